#!/bin/sh
# Fails when the committed Python code is not what the protos generate.
# Usage: check_proto.sh PYTHON
set -eu
cd "$(dirname "$0")/.."
fresh=$(mktemp -d)
trap 'rm -rf "$fresh"' EXIT
"$1" -m grpc_tools.protoc -I proto --python_out="$fresh" --pyi_out="$fresh" \
    --grpc_python_out="$fresh" proto/tasuki/v1/*.proto
for file in "$fresh"/tasuki/v1/*; do
    cmp -s "$file" "python/tasuki/v1/$(basename "$file")" || {
        echo "python/tasuki/v1/$(basename "$file") is not what proto/ generates: run make proto" >&2
        exit 1
    }
done
