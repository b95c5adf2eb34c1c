#!/usr/bin/env bash
# A Slurm cluster of one node with one fake H100 that SkyPilot can rent: munge, slurmctld, slurmd and sshd, all on loopback
# and below DIR. It needs root and the packages of scripts/setup_slurm.sh. Run it in its own namespaces:
#   unshare --pid --mount --fork --mount-proc --kill-child bash tests/runners/slurm_on_loopback.sh DIR
# It is then invisible outside, and killing it ends all its processes. DIR/ready appears when it takes jobs; SkyPilot finds
# it with HOME=DIR/home. It runs until it is killed.
set -euo pipefail
dir=$(realpath "$1")
ssh_port=${2:-22622} ctld_port=${3:-22617} slurmd_port=${4:-22618}
host=$(uname -n)
mkdir -p "$dir"/{home/.ssh,home/.slurm,bin,etc/slurm,munge,run,spool/ctld,spool/d,log,dev}
chmod 755 "$dir" "$dir/munge" "$dir/run" "$dir/log"
chmod 700 "$dir/home/.ssh"

# Slurm and ssh look up root's home and the name of the host: both are private to this mount namespace.
sed -E "s|^(root:[^:]*:[^:]*:[^:]*:[^:]*):[^:]*:.*|\1:$dir/home:/bin/bash|" /etc/passwd >"$dir/etc/passwd"
{ echo "127.0.0.1 localhost $host"; } >"$dir/etc/hosts"
mount --bind "$dir/etc/passwd" /etc/passwd
mount --bind "$dir/etc/hosts" /etc/hosts
mkdir -p /etc/slurm /run/sshd
mount --bind "$dir/etc/slurm" /etc/slurm

touch "$dir/dev/nvidia0" # An empty file: Slurm counts it as a device, and nothing opens it.
cat >/etc/slurm/slurm.conf <<CONF
ClusterName=loopback
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$ctld_port
SlurmdPort=$slurmd_port
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
AuthType=auth/munge
AuthInfo=socket=$dir/run/munge.socket
CryptoType=crypto/munge
SlurmUser=root
StateSaveLocation=$dir/spool/ctld
SlurmdSpoolDir=$dir/spool/d
SlurmctldPidFile=$dir/run/slurmctld.pid
SlurmdPidFile=$dir/run/slurmd.pid
SlurmctldLogFile=$dir/log/slurmctld.log
SlurmdLogFile=$dir/log/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
KillWait=2
GresTypes=gpu
NodeName=$host NodeAddr=127.0.0.1 CPUs=16 RealMemory=64000 Gres=gpu:H100:1 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=UNLIMITED State=UP
CONF
# More CPUs than there are: SkyPilot asks for some beside each GPU.
echo "SlurmdParameters=config_overrides" >>/etc/slurm/slurm.conf
echo "NodeName=$host Name=gpu Type=H100 File=$dir/dev/nvidia0" >/etc/slurm/gres.conf

dd if=/dev/urandom of="$dir/munge/munge.key" bs=1024 count=1 status=none
chown -R munge "$dir/munge" "$dir/run" 2>/dev/null || true
chmod 400 "$dir/munge/munge.key"
[ -f "$dir/etc/host_key" ] || ssh-keygen -q -t ed25519 -N "" -f "$dir/etc/host_key"
[ -f "$dir/home/.ssh/slurm" ] || ssh-keygen -q -t ed25519 -N "" -f "$dir/home/.ssh/slurm"
cp "$dir/home/.ssh/slurm.pub" "$dir/home/.ssh/authorized_keys"
cat >"$dir/etc/sshd_config" <<CONF
Port $ssh_port
ListenAddress 127.0.0.1
HostKey $dir/etc/host_key
AuthorizedKeysFile $dir/home/.ssh/authorized_keys
PermitRootLogin prohibit-password
PasswordAuthentication no
UsePAM no
StrictModes no
PidFile $dir/run/sshd.pid
AcceptEnv *
Subsystem sftp internal-sftp
CONF
cat >"$dir/home/.slurm/config" <<CONF
Host loopback
  HostName 127.0.0.1
  Port $ssh_port
  User root
  IdentityFile $dir/home/.ssh/slurm
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
CONF
# SkyPilot installs its own Python on every node: it downloads uv with curl, and Python 3.10 with uv. Here both are replaced
# by what this machine has, and packages come from the cache of this checkout's environment.
python=${PYTHON:-$(command -v python3)} cache=$(uv cache dir)
uv=$(uv run --no-project python -c "import os; print(os.environ[\"UV\"])") # The real uv, where `uv` is a shim.
cat >"$dir/bin/uv" <<UV
#!/usr/bin/env bash
words=()
for word in "\$@"; do [ "\$word" = 3.10 ] && word=$python; words+=("\$word"); done
$(export -p | grep -E '^declare -x (SSL_|UV_|[A-Za-z_]*_?(PROXY|proxy)=)' || true)
export UV_CACHE_DIR=$cache
# Only for projects: SkyPilot's own \`uv pip\` and \`uv run --no-project\` must stay in its environment.
[ "\$1" = run ] && [[ " \$* " != *" --no-project "* ]] && export UV_PYTHON=$python
exec $uv "\${words[@]}"
UV
cat >"$dir/bin/curl" <<CURL
#!/usr/bin/env bash
echo 'mkdir -p "\$UV_INSTALL_DIR" && ln -sf $dir/bin/uv "\$UV_INSTALL_DIR/uv"'
CURL
chmod +x "$dir/bin/uv" "$dir/bin/curl"
for file in .profile .bashrc; do echo "export PATH=$dir/bin:\$PATH" >"$dir/home/$file"; done
mkdir -p "$dir/home/.sky"
echo "allowed_clouds: [slurm]" >"$dir/home/.sky/config.yaml" # SkyPilot would check the credentials of other clouds over the network.

export HOME="$dir/home"
setpriv --reuid munge --regid munge --clear-groups munged --force --key-file "$dir/munge/munge.key" --socket "$dir/run/munge.socket" \
  --pid-file "$dir/munge/munged.pid" --log-file "$dir/munge/munged.log" --seed-file "$dir/munge/seed"
slurmctld
slurmd -N "$host"
/usr/sbin/sshd -f "$dir/etc/sshd_config" -E "$dir/log/sshd.log"
for _ in $(seq 100); do
  [ "$(sinfo -h -o %t 2>/dev/null)" = idle ] && break
  sleep 0.2
done
sinfo >"$dir/log/sinfo"
[ "$(sinfo -h -o %t)" = idle ] || { cat "$dir"/log/*.log >&2; exit 1; }
touch "$dir/ready"
exec sleep infinity
