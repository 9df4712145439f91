#!/usr/bin/env bash
# Runs a release and this checkout together and keeps what the tests said, with versions and time:
#   tools/upgrade_suite.sh [BASE [LOG]]          PYTHON chooses the interpreter, of the .venv
# BASE is a tag or commit, the newest release if it is not named. v0.1.0, which speaks version 1
# of the wire, is refused. Both are built once, in target/revisions.
set -euo pipefail
cd "$(dirname "$0")/.."
newest=$(basename "$(printf '%s\n' proto/released/*/ | sort -V | tail -n 1)")
base=${1:-v$newest}
log=${2:-benchmarks/results/upgrade.log}
export PYTHON=${PYTHON:-python}

TASUKI_UPGRADE_BASE=$base=$(tools/build_revision.sh "$base")
TASUKI_UPGRADE_FIRST=v0.1.0=$(tools/build_revision.sh v0.1.0)
export TASUKI_UPGRADE_BASE TASUKI_UPGRADE_FIRST

about() {
  date -u +%FT%TZ
  echo "head is $(git describe --tags --always --dirty), $base is commit $(git rev-parse --short "$base^{commit}")"
  echo "$(nproc) cores, $(grep -m1 'model name' /proc/cpuinfo | cut -d: -f2 | xargs), $(uname -sr)"
  cat /proc/loadavg
  "$PYTHON" --version
}

suite() {
  local status=0
  about
  PYTHONUNBUFFERED=1 TQDM_DISABLE=1 "$PYTHON" -m pytest tests/upgrade -p no:cacheprovider \
    --no-header -v -ra -s --tb=short || status=1
  echo "took $SECONDS s; $([ "$status" = 0 ] && echo passed || echo FAILED)"
  return "$status"
}

mkdir -p "$(dirname "$log")"
suite 2>&1 | tee "$log"
