#!/usr/bin/env bash
# Runs the tests of a cluster's kind and keeps what they said, with versions and time:
#   tools/cluster_suite.sh ray|kubernetes [LOG]          PYTHON chooses the interpreter
# They need root: everything runs in network namespaces.
set -euo pipefail
cd "$(dirname "$0")/.."
kind=$1
log=${2:-benchmarks/results/cluster_$kind.log}
python=${PYTHON:-python}
tools=${TASUKI_CLUSTER_TOOLS:-$HOME/.cache/tasuki/cluster-tools}

about() {
  date -u +%FT%TZ
  git log -1 --format='commit %h' 2>/dev/null || true
  echo "$(nproc) cores, $(grep -m1 'model name' /proc/cpuinfo | cut -d: -f2 | xargs), $(uname -sr)"
  cat /proc/loadavg
  "$python" - "$kind" <<'PYTHON'
import importlib.metadata
import platform
import sys

print("python", platform.python_version())
for name in (sys.argv[1], "torch", "nixl-cu13", "transformers"):
    try:
        print(name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        pass
PYTHON
  if [ "$kind" = kubernetes ]; then
    "$tools/kube-apiserver" --version
    "$tools/etcd" --version | sed -n 1p
    echo "Helm $("$tools/helm" version --short), ${TASUKI_CLUSTER_NODES:-2} nodes"
  fi
}

suite() {
  local status=0
  about
  PYTHONUNBUFFERED=1 "$python" -m pytest tests/cluster/*"$kind"* -p no:cacheprovider \
    --no-header -v -ra -s --tb=short || status=1
  echo "took $SECONDS s; $([ "$status" = 0 ] && echo passed || echo FAILED)"
  return "$status"
}

mkdir -p "$(dirname "$log")"
suite 2>&1 | tee "$log"
