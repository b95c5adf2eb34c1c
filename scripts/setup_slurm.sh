#!/usr/bin/env bash
# Installs what `pytest -m slurm` needs beside the sky extra: Slurm, munge, an ssh server and rsync. Debian, as root. It starts
# no service: the tests run their own, on loopback (tests/runners/slurm_on_loopback.sh).
# Usage: scripts/setup_slurm.sh          What is there already is kept.
set -euo pipefail
missing=()
for pair in slurmctld:slurm-wlm slurmd:slurm-wlm munged:munge sshd:openssh-server rsync:rsync unshare:util-linux; do
  PATH="$PATH:/usr/sbin" command -v "${pair%%:*}" >/dev/null || missing+=("${pair##*:}")
done
if [ ${#missing[@]} -gt 0 ]; then
  [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || {
    echo "install ${missing[*]} first (Debian: apt-get install ${missing[*]})" >&2
    exit 1
  }
  apt-get update -qq
  # No service of theirs may start: a policy that says no, for as long as they are installed.
  policy=/usr/sbin/policy-rc.d
  [ -e $policy ] || { printf '#!/bin/sh\nexit 101\n' >$policy; chmod +x $policy; trap "rm -f $policy" EXIT; }
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
fi
echo "ready: $(PATH="$PATH:/usr/sbin" slurmctld -V)"
