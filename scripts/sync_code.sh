#!/usr/bin/env bash
# Brings this checkout's files to the cluster that launch_tpu.sh or launch_gpu.sh made last, or to the one of the kind named.
# Usage: scripts/sync_code.sh [tpu|gpu]
set -euo pipefail
cd "$(dirname "$0")/.."
case "${1:-newest}" in
  tpu | gpu) file=.cluster_name_$1 ;;
  newest) file=$(ls -t .cluster_name_tpu .cluster_name_gpu 2>/dev/null | head -n 1 || true) ;;
  *) echo "usage: scripts/sync_code.sh [tpu|gpu], not $1" >&2; exit 2 ;;
esac
[ -s "$file" ] || { echo "there is no ${file:-.cluster_name_tpu or .cluster_name_gpu}; scripts/launch_${1:-tpu}.sh makes one" >&2; exit 2; }
exec uv run --extra sky tilewright remote sync --on "sky:$(cat "$file")"
