#!/usr/bin/env bash
# Lays out what `tilewright compile` needs on this machine.
# For TPUs: libtpu, of the series that the installed jax is released with, and off x86-64 also qemu-user and a small x86-64
# root file system with a Python in it (about 1.2 GB, a minute or two).
# For GPUs: jax's CUDA plugin of the same release, ptxas and nvdisasm (about 410 MB, some ten seconds; Linux on x86-64 or
# aarch64). No GPU, driver or CUDA library is needed.
# Usage: scripts/setup_aot.sh [tpu|gpu]   Both by default. What is there already is kept.
# `tilewright compile --doctor` says what is missing.
set -euo pipefail
cd "$(dirname "$0")/.."

case "${1:-}" in
  tpu | gpu) ;;
  "") # One may fail without the other.
    status=0
    for each in gpu tpu; do bash scripts/setup_aot.sh "$each" || status=1; done
    exit "$status"
    ;;
  *)
    echo "usage: scripts/setup_aot.sh [tpu|gpu]" >&2
    exit 2
    ;;
esac
read -r dir series cuda <<<"$(uv run --quiet python -c \
  'from tilewright.aot.toolchain import cuda_wanted, home, libtpu_wanted; print(home(), libtpu_wanted(), cuda_wanted())')"
mkdir -p "$dir"

setup_gpu() {
  if [ "$(uname -s)" != Linux ]; then
    echo "jax's CUDA plugin has wheels for Linux only: GPUs are left out" >&2
    exit 1
  fi
  local have
  have=$(cat "$dir/cuda/VERSION" 2>/dev/null || true)
  if [[ "$have" != "$cuda,"* ]]; then
    echo "jax-cuda13-plugin $cuda, ptxas, nvdisasm"
    rm -rf "$dir/cuda" "$dir/cuda.part" "$dir/package"
    uv pip install --quiet --no-deps --only-binary :all: --target "$dir/package" \
      "jax-cuda13-plugin==$cuda" "jax-cuda13-pjrt==$cuda" nvidia-cuda-nvcc nvidia-cuda-nvdisasm
    mkdir -p "$dir/cuda.part/bin"
    # Of 520 MB, what the compiler reads.
    mv "$dir"/package/jax_plugins/xla_cuda13/xla_cuda_plugin.so "$dir"/package/jax_cuda13_plugin/libmosaic_gpu_runtime.so \
      "$dir/cuda.part/"
    mv "$dir"/package/nvidia/cu13/bin/{ptxas,nvdisasm} "$dir/cuda.part/bin/"
    local ptxas
    ptxas=$(basename "$dir"/package/nvidia_cuda_nvcc-*.dist-info | sed -E 's/^nvidia_cuda_nvcc-(.*)\.dist-info$/\1/')
    echo "$cuda, ptxas $ptxas" >"$dir/cuda.part/VERSION"
    mv "$dir/cuda.part" "$dir/cuda"
    rm -rf "$dir/package"
  fi
  echo "ready for GPUs: $dir (jax-cuda13-plugin $(cat "$dir/cuda/VERSION"))"
}

setup_tpu() {
  local have
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
  echo "ready for TPUs: $dir (libtpu $(cat "$dir/libtpu/VERSION"))"
}

"setup_$1"
