#!/bin/sh
# Names everything that is missing on this machine, one clear line each, before
# anything long begins. Prints the Python to use as its only stdout line.
set -u
cd "$(dirname "$0")/.."
missing=0

need() {
    echo "setup: missing: $1" >&2
    missing=1
}

case "$(uname -s)-$(uname -m)" in
    Linux-x86_64) ;;
    *) need "Linux on x86-64 (this is $(uname -s) on $(uname -m))" ;;
esac

python=""
for candidate in ${PYTHON:-} python3 python3.14 python3.13 python3.12 python3.11; do
    if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' >/dev/null 2>&1; then
        python=$(command -v "$candidate")
        break
    fi
done
if [ -z "$python" ]; then
    need "Python 3.11 to 3.14 (python3 is $(python3 --version 2>&1 || true)); install one, or name it: make PYTHON=/path/to/python3"
elif ! "$python" -c 'import venv, ensurepip' 2>/dev/null; then
    need "the venv module of $python; on Debian and Ubuntu: apt install python3-venv"
fi

if ! command -v cc >/dev/null 2>&1 && ! command -v gcc >/dev/null 2>&1; then
    need "a C compiler (cc); on Debian and Ubuntu: apt install gcc libc6-dev"
fi

wanted=$(sed -n 's/^rust-version *= *"\([0-9.]*\)"/\1/p' Cargo.toml)
if ! command -v cargo >/dev/null 2>&1 || ! command -v rustc >/dev/null 2>&1; then
    need "cargo, Rust $wanted or newer; see https://rustup.rs"
else
    found=$(rustc --version | cut -d' ' -f2 | cut -d- -f1)
    oldest=$(printf '%s\n%s\n' "$wanted" "$found" | sort -V | head -n 1)
    if [ "$oldest" != "$wanted" ]; then
        need "Rust $wanted or newer (rustc is $found); run: rustup update stable"
    fi
fi

[ "$missing" -eq 0 ] || exit 1
echo "$python"
