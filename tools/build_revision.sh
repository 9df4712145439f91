#!/usr/bin/env bash
# Checks a revision out beside this one and builds its extension, so that both can run together:
#   tools/build_revision.sh REVISION        PYTHON chooses the interpreter, of a .venv with maturin
# Prints the folder, target/revisions/COMMIT. It is kept: a second call does nothing. Crates of
# others are compiled once for all revisions, in this checkout's target folder.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
venv=$(dirname "$(dirname "$(command -v "${PYTHON:-python}")")")
commit=$(git rev-parse --verify --quiet "$1^{commit}") || {
  echo "there is no revision $1 here: name a tag or commit, or fetch the tags" >&2
  exit 1
}
folder=$root/target/revisions/${commit:0:12}
if [ ! -e "$folder/built" ]; then
  rm -rf "$folder"
  mkdir -p "$folder"
  git archive "$commit" | tar -x -C "$folder"
  # What this checkout's extension has, as far as that revision knows it; else all crates compile anew.
  features=extension-module
  for feature in $(tr , ' ' <"$venv/.stamps/native" 2>/dev/null); do
    if grep -q "^$feature = " "$folder/crates/py/Cargo.toml"; then features+=,$feature; fi
  done
  (
    cd "$folder"
    export PATH=$venv/bin:$PATH VIRTUAL_ENV=$venv CARGO_TARGET_DIR=$root/target
    unset MAKEFLAGS MFLAGS
    maturin develop --release --skip-install --features "$features"
  ) >&2
  # A worker reports the version of the distribution that is found first.
  version=$(sed -n '0,/^version = /s/^version = "\(.*\)"/\1/p' "$folder/Cargo.toml")
  mkdir "$folder/python/tasuki-$version.dist-info"
  printf 'Metadata-Version: 2.1\nName: tasuki\nVersion: %s\n' "$version" \
    >"$folder/python/tasuki-$version.dist-info/METADATA"
  touch "$folder/built"
fi
echo "$folder"
