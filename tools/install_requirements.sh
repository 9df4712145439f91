#!/bin/sh
# Usage: install_requirements.sh VENV ARGUMENT...
# Installs with uv when it can be had, which is many times faster, else with pip.
set -eu
venv=$1
shift

"$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$venv/bin/python" -m ensurepip >/dev/null

# uv does not read pip's configuration: with an index set there, pip it is.
if [ -z "${UV_DEFAULT_INDEX:-}${UV_INDEX_URL:-}" ] &&
    "$venv/bin/python" -m pip config list 2>/dev/null | grep -q 'index-url'; then
    exec "$venv/bin/python" -m pip install --disable-pip-version-check "$@"
fi
if [ ! -x "$venv/bin/uv" ]; then
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check uv ||
        echo "setup: no uv to be had, going on with pip" >&2
fi
if [ -x "$venv/bin/uv" ] && VIRTUAL_ENV=$venv "$venv/bin/uv" pip install "$@"; then
    exit 0
fi
exec "$venv/bin/python" -m pip install --disable-pip-version-check "$@"
