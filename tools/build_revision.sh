#!/usr/bin/env bash
# Checks a revision out beside this one and builds its extension, so that both can run together:
#   tools/build_revision.sh REVISION        PYTHON chooses the interpreter, of a .venv with maturin
# Prints the folder, target/revisions/COMMIT. It is kept: a second call does nothing.
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
  # Crates of others are not compiled again. Each revision has a target folder of its own: in one
  # that they share cargo takes crates of equal version for the same, whatever their source.
  if [ -d target/release/deps ]; then
    mkdir -p "$folder/target/release"
    cp -al target/release/{.fingerprint,build,deps} "$folder/target/release"
    find "$folder/target/release" -mindepth 2 -maxdepth 2 \
      \( -name '*tasuki*' -o -name 'lib_native.*' -o -name '_native.*' \) -exec rm -rf {} +
  fi
  # What this checkout's extension has, as far as that revision knows it; else all crates compile anew.
  features=extension-module
  for feature in $(tr , ' ' <"$venv/.stamps/native" 2>/dev/null); do
    if grep -q "^$feature = " "$folder/crates/py/Cargo.toml"; then features+=,$feature; fi
  done
  (
    cd "$folder"
    export PATH=$venv/bin:$PATH VIRTUAL_ENV=$venv
    unset MAKEFLAGS MFLAGS CARGO_TARGET_DIR
    maturin develop --release --skip-install --features "$features"
  ) >&2
  # A worker reports the version of the distribution that is found first.
  version=$(sed -n '0,/^version = /s/^version = "\(.*\)"/\1/p' "$folder/Cargo.toml")
  mkdir "$folder/python/tasuki-$version.dist-info"
  printf 'Metadata-Version: 2.1\nName: tasuki\nVersion: %s\n' "$version" \
    >"$folder/python/tasuki-$version.dist-info/METADATA"
  rm -rf "$folder/target"
  touch "$folder/built"
fi
echo "$folder"
