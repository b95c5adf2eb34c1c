#!/usr/bin/env bash
# What launch_tpu.sh and launch_gpu.sh share: scripts/launch.sh tpu|gpu ACCELERATOR EXPERIMENT [more of `remote launch`]
set -euo pipefail
cd "$(dirname "$0")/.."
kind=$1
shift
if [ $# -lt 2 ]; then
  example=$([ "$kind" = tpu ] && echo tpu-v6e-8 || echo H200:1)
  echo "usage: scripts/launch_$kind.sh ACCELERATOR EXPERIMENT [OPTIONS], such as scripts/launch_$kind.sh $example kda-blocks" >&2
  exit 2
fi
# The name follows from the words, so that a launch that was killed is found again by the same ones.
name=$(echo "tw-$2-$1" | tr '[:upper:]' '[:lower:]' | sed -E 's/[^a-z0-9]+/-/g; s/^(.{0,60}).*/\1/; s/-+$//')
echo "$name" >".cluster_name_$kind" # Before the launch: it may be killed in the middle.
echo "sky:$name"
exec uv run --extra sky tilewright remote launch --on "sky:$name" --accelerator "$1" \
  --template "scripts/${kind}_resource.sky.yaml" "${@:3}"
