#!/usr/bin/env bash
# Rents a TPU for an experiment: the plan and its price first, then the question.
# Usage: scripts/launch_tpu.sh ACCELERATOR EXPERIMENT [more of `tilewright remote launch`, such as --spot or --yes]
#        scripts/launch_tpu.sh tpu-v6e-8 kda-blocks
# The cluster's name goes to .cluster_name_tpu, for scripts/sync_code.sh. The same words again find the same cluster.
set -euo pipefail
cd "$(dirname "$0")/.."
exec scripts/launch.sh tpu "$@"
