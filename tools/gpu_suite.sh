#!/usr/bin/env bash
# Runs the tests that need a GPU and keeps what they said, with versions, device and time:
#   tools/gpu_suite.sh [LOG]          PYTHON chooses the interpreter
# Most of their time is the compiling of kernels on the CPU: parts that need little of the
# GPU run side by side, each on one of the GPUs. SEVERAL=1 runs those alone that need more than
# one GPU. Fails if there is no GPU, if a test fails, or beyond LIMIT_S. Lines begin with the
# second and the part.
set -euo pipefail
cd "$(dirname "$0")/.."
log=${1:-benchmarks/results/gpu_suite.log}
python=${PYTHON:-python}
LIMIT_S=${LIMIT_S:-1200}
# PARTS, one a line, replaces all parts: tools/gpu_emulated.sh
together=(
  "test_attention -k not(other_head_dims)and(not(mixed_steps_in))"
  "test_attention -k other_head_dims"
  "test_attention -k mixed_steps_in"
  "test_gpu_engine test_gpu_gemms"
  "test_models"
  "test_fallback"
)
# The others, which start servers that measure the free memory, come after them.
alone=()
for file in tests/gpu/test_*.py; do
  name=$(basename "$file" .py)
  [[ " ${together[*]} " == *" $name "* ]] || alone+=("$name")
done
if [ -n "${SEVERAL:-}" ]; then
  together=()
  alone=(test_rank_handoff test_handoff test_tensor_parallel)
fi
if [ -n "${PARTS:-}" ]; then
  mapfile -t together <<<"$PARTS"
  alone=()
fi

about() {
  date -u +%FT%TZ
  git log -1 --format='commit %h' 2>/dev/null || true
  nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
  "$python" - <<'PYTHON'
import importlib.metadata
import platform

print("python", platform.python_version())

import torch

for name in ("torch", "triton", "flashinfer-python", "nixl-cu12", "nixl-cu13", "transformers"):
    try:
        print(name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        pass
assert torch.cuda.is_available(), "there is no GPU that torch can use"
PYTHON
}

# Runs the tests of some files, with options of pytest.
part() {
  local words=() line
  for word in "$@"; do
    case $word in test_*) words+=("tests/gpu/$word.py") ;; *) words+=("$word") ;; esac
  done
  PYTHONUNBUFFERED=1 timeout --kill-after=5 "$((LIMIT_S > SECONDS ? LIMIT_S - SECONDS : 1))" \
    "$python" -m pytest "${words[@]}" --confcutdir tests/gpu -m gpu -p no:cacheprovider \
    -o faulthandler_timeout="$LIMIT_S" --timeout "$LIMIT_S" \
    --no-header -v -ra --tb=short --durations=8 2>&1 |
    while IFS= read -r line; do printf '%3d %s %s\n' "$SECONDS" "${1#test_}" "$line"; done
}

suite() {
  local status=0 jobs=() gpus took
  about || return 1
  gpus=$(nvidia-smi --list-gpus | wc -l)
  for names in "${together[@]}"; do
    # shellcheck disable=SC2086  # several words
    CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-$((${#jobs[@]} % gpus))} part $names &
    jobs+=("$!")
  done
  for job in "${jobs[@]}"; do wait "$job" || status=1; done
  [ "${#alone[@]}" = 0 ] || part "${alone[@]}" || status=1
  took=$SECONDS
  echo "took $took s of at most $LIMIT_S; $([ "$status" = 0 ] && echo passed || echo FAILED)"
  [ "$took" -le "$LIMIT_S" ] || status=1
  return "$status"
}

mkdir -p "$(dirname "$log")"
suite 2>&1 | tee "$log"
