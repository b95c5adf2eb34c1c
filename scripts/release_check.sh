#!/usr/bin/env bash
# Builds the source distribution and the wheel as a release has them, and tries the wheel in environments that have nothing
# else: the import, every op on a CPU, the command line, and text from a tiny checkpoint.
#
#   bash scripts/release_check.sh            # with the oldest and the newest jax that pyproject.toml admits
#   bash scripts/release_check.sh newest     # with one of them, or with a version: 0.12.0
#
# The wheel is built from the source distribution, and must have the same files as one that is built from the checkout.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"
checkpoint=$root/tests/golden/models/qwen3
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

step() { echo "=== $1 ($SECONDS s)"; shift; "$@"; }
# In a folder of its own, uv does not read the versions that pyproject.toml pins for development: users do not have them.
uv_alone() { uv --directory "$work" "$@"; }
names() { python3 -c 'import sys, zipfile; print("\n".join(sorted(zipfile.ZipFile(sys.argv[1]).namelist())))' "$1"; }

admitted=$(sed -nE 's/^ *"jax(>=[^"]*)",$/\1/p' pyproject.toml)
oldest=$(sed -E 's/>=([^,]*).*/\1/' <<<"$admitted")
[ -n "$oldest" ] || { echo "error: pyproject.toml has no line such as \"jax>=0.11.2,<0.13\" among its dependencies" >&2; exit 1; }

step "source distribution, and the wheel from it" uv build --quiet --out-dir "$work/dist"
step "the wheel from the checkout" uv build --quiet --wheel --out-dir "$work/direct"
wheel=$(ls "$work"/dist/*.whl)
diff <(names "$wheel") <(names "$work"/direct/*.whl) || {
  echo "error: the wheel from the source distribution and the one from the checkout have other files" >&2
  exit 1
}

try() { # The wheel with a jax: "oldest", "newest" or a version.
  local jax env=$work/$1
  case $1 in oldest) jax="==$oldest" ;; newest) jax=$admitted ;; *) jax="==$1" ;; esac
  step "an environment with jax$jax" uv_alone venv --quiet --python 3.12 "$env"
  uv_alone pip install --quiet --python "$env" "tilewright[bench,models] @ file://$wheel" "jax$jax"
  # In an empty folder, so that nothing is imported but what was installed.
  mkdir "$work/in-$1"
  cd "$work/in-$1"
  step "import, and every op" env JAX_PLATFORMS=cpu "$env/bin/python" "$root/scripts/release_ops.py"
  step "tilewright check" env JAX_PLATFORMS=cpu "$env/bin/tilewright" check rms_norm --case odd --dtype float32
  step "tilewright generate" env JAX_PLATFORMS=cpu "$env/bin/tilewright" generate "$checkpoint" --ids "1 15 7" \
    --max-new-tokens 4 --dtype float32 | tee generated.txt
  [ "$(tail -n 1 generated.txt | wc -w)" -eq 4 ] || { echo "error: generate did not print 4 tokens" >&2; exit 1; }
  cd "$root"
}

for which in "${@:-oldest newest}"; do
  for each in $which; do try "$each"; done
done
echo "$(basename "$wheel"): done in $SECONDS s"
