#!/usr/bin/env bash
# Which split suits your load? Starts colocated workers and every split of as many workers, finds
# the highest rate at which each meets the objectives, and draws the answer. On two CPU cores
# smollm2-135m takes some 50 minutes.
#   examples/which_split.sh MODEL [INPUT:OUTPUT] [OBJECTIVES] [WORKERS]
set -euo pipefail
model=${1:?a model folder, a hub id, or smollm2-135m}
lengths=${2:-1000:200}
objectives=${3:-ttft=1s,tpot=50ms}
workers=${4:-2}
out=${OUT:-results/which_split}
tasuki bench sweep --model "$model" --workers "$workers" --find-goodput --slo "$objectives" \
  --load "mine --lengths $lengths --num-requests 100" --output "$out"
tasuki plot "$out" --out "$out/plots"
echo "pictures: $out/plots"
