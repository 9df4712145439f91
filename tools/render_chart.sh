#!/bin/sh
# Renders the chart with each file of values that the tests have.
# Usage: render_chart.sh HELM FOLDER
set -eu
cd "$(dirname "$0")/.."
mkdir -p "$2"
for values in tests/deploy/values/*.yaml; do
    "$1" template demo deploy/helm/tasuki --namespace ml --kube-version 1.37.2 \
        --values "$values" >"$2/$(basename "$values")"
done
