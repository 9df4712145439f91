#!/bin/sh
# Builds a wheel with every feature, without debug information; maturin checks the libraries it links and
# names the lowest manylinux that it runs on. Needs maturin on the PATH.
# Usage: build_wheel.sh FOLDER
set -eu
cd "$(dirname "$0")/.."
exec maturin build --release --features extension-module,tls,otel --out "$1"
