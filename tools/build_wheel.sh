#!/bin/sh
# Builds a stripped wheel; maturin checks the libraries it links and
# names the lowest manylinux that it runs on. Needs maturin on the PATH.
# Usage: build_wheel.sh FOLDER
set -eu
cd "$(dirname "$0")/.."
exec maturin build --release --strip --out "$1"
