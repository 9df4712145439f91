#!/bin/sh
# Builds the extension in place, where cargo's progress can be seen. Needs maturin in
# VENV, and none of the requirements.
# Usage: build_native.sh VENV [FEATURES]
# FEATURES: of crates/py, besides what serving needs; with commas.
set -eu
cd "$(dirname "$0")/.."
PATH=$1/bin:$PATH VIRTUAL_ENV=$1
export PATH VIRTUAL_ENV
unset MAKEFLAGS MFLAGS # cargo has its own number of jobs
exec "$1/bin/maturin" develop --release --skip-install --features "extension-module${2:+,$2}"
