#!/bin/sh
# Builds the extension in place, where cargo's progress can be seen, and makes the
# checkout the installed package `tasuki`. Installs nothing else: with its
# dependencies `maturin develop` would bring the development tools, unpinned.
# Usage: build_native.sh VENV
set -eu
cd "$(dirname "$0")/.."
PATH=$1/bin:$PATH VIRTUAL_ENV=$1
export PATH VIRTUAL_ENV
"$1/bin/maturin" develop --release --skip-install
exec tools/install_requirements.sh "$1" --no-deps --no-build-isolation -e .
