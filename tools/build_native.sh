#!/bin/sh
# Builds the extension and makes the checkout the installed package `tasuki`.
# Usage: build_native.sh VENV
set -eu
cd "$(dirname "$0")/.."
installer=""
[ ! -x "$1/bin/uv" ] || installer="--uv"
PATH=$1/bin:$PATH VIRTUAL_ENV=$1 exec "$1/bin/maturin" develop --release $installer
