#!/usr/bin/env bash
# Lays out what `tilewright compile` needs on this machine: libtpu, of the series that the installed jax is released with,
# and off x86-64 also qemu-user and a small x86-64 root file system with a Python in it (about 1.2 GB, a minute or two).
# Usage: scripts/setup_aot.sh        What is there already is kept. `tilewright compile --doctor` says what is missing.
set -euo pipefail
cd "$(dirname "$0")/.."

read -r dir series <<<"$(uv run --quiet python -c \
  'from tilewright.aot.toolchain import home, libtpu_wanted; print(home(), libtpu_wanted())')"
mkdir -p "$dir"

have=$(cat "$dir/libtpu/VERSION" 2>/dev/null || true)
if [ ! -s "$dir/libtpu/libtpu.so" ] || [[ "$have" != "$series"* ]]; then
  echo "libtpu $series.*"
  rm -rf "$dir/libtpu" "$dir/package"
  uv pip install --quiet --no-deps --only-binary :all: --target "$dir/package" \
    --python-platform x86_64-manylinux_2_31 --python-version 3.12 "libtpu==$series.*"
  mv "$dir/package/libtpu" "$dir/libtpu"
  basename "$dir"/package/libtpu-*.dist-info | sed -E 's/^libtpu-(.*)\.dist-info$/\1/' >"$dir/libtpu/VERSION"
  rm -rf "$dir/package"
fi

if [ "$(uname -m)" != x86_64 ]; then
  if ! command -v qemu-x86_64-static >/dev/null || { [ ! -x "$dir/root/usr/bin/python3.11" ] && ! command -v debootstrap >/dev/null; }; then
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || {
      echo "install qemu-user-static and debootstrap first (Debian: apt-get install qemu-user-static debootstrap)" >&2
      exit 1
    }
    echo "qemu-user-static, debootstrap"
    apt-get update -qq
    apt-get install -y -qq qemu-user-static debootstrap >/dev/null
  fi
  if [ ! -x "$dir/root/usr/bin/python3.11" ]; then
    echo "x86-64 root"
    rm -rf "$dir/root" "$dir/root.part"
    # Packages are only fetched and unpacked: nothing of the foreign system is run to set it up.
    debootstrap --arch=amd64 --foreign --variant=minbase --include=python3,libstdc++6,zlib1g,libexpat1 \
      bookworm "$dir/root.part" >"$dir/debootstrap.log"
    for package in "$dir"/root.part/var/cache/apt/archives/*.deb; do dpkg-deb -x "$package" "$dir/root.part"; done
    ln -sf ../lib/x86_64-linux-gnu/ld-linux-x86-64.so.2 "$dir/root.part/lib64/ld-linux-x86-64.so.2"
    rm -rf "$dir"/root.part/var/cache/apt/archives
    mv "$dir/root.part" "$dir/root"
  fi
fi
echo "ready: $dir (libtpu $(cat "$dir/libtpu/VERSION"))"
