#!/usr/bin/env bash
# Runs the tests that need a GPU and keeps what they said, with versions, device and time:
#   tools/gpu_suite.sh [LOG]          PYTHON chooses the interpreter
# Fails if there is no GPU, if a test fails, or if it took longer than LIMIT_S: kernels that
# were never compiled on this machine are compiled first, then run it again.
set -euo pipefail
cd "$(dirname "$0")/.."
log=${1:-benchmarks/results/gpu_suite.log}
python=${PYTHON:-python}
LIMIT_S=${LIMIT_S:-240}

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

suite() {
  local begin=$SECONDS status=0 took
  about || return 1
  "$python" -m pytest tests/gpu --confcutdir tests/gpu -m gpu --no-header -q -ra --durations=12 || status=$?
  took=$((SECONDS - begin))
  echo "took $took s of at most $LIMIT_S"
  [ "$took" -le "$LIMIT_S" ] || status=1
  return "$status"
}

mkdir -p "$(dirname "$log")"
suite 2>&1 | tee "$log"
