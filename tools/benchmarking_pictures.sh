#!/bin/sh
# Makes the pictures and tables of docs/benchmarking.md with the real thing, anew
# (about 15 minutes on two cores; a quiet machine gives quiet pictures). What was
# measured is kept, and not measured again while it is there.
# Usage: benchmarking_pictures.sh VENV [FOLDER]
set -eu
cd "$(dirname "$0")/.."
tasuki=$1/bin/tasuki
results=${2:-results/benchmarking}
images=docs/images
mkdir -p "$results/one" "$results/batch" "$images"

if [ ! -f "$results/one/run.json" ]; then
    "$tasuki" serve --prefill 1 --decode 1 --port 8123 --max-model-len 2048 --quiet \
        >"$results/serve.log" 2>&1 &
    server=$!
    trap 'kill -INT $server; wait $server || true' EXIT
    "$tasuki" bench serve --base-url http://127.0.0.1:8123 --ready-timeout-s 300 \
        --tokenizer "$("$tasuki" model path)" \
        --input-tokens 192 --output-tokens 32 --range-ratio 0.5 --num-requests 60 \
        --request-rate 2 --slo ttft=2s,tpot=200ms --warmup 8 --label 1p1d \
        --output "$results/one/run.json" >"$results/one/report.txt"
    kill -INT $server
    wait $server || true
    trap - EXIT
fi
if [ ! -f "$results/batch/batch.json" ]; then
    "$tasuki" bench batch --topology 1p1d --serve max-model-len=2048 --batch 1,2,4,8,16 \
        --input-tokens 64,256,512 --output-tokens 16 -o "$results/batch/batch.json" \
        >"$results/batch/report.txt"
fi
"$tasuki" bench sweep benchmarks/sweep.yaml -o "$results/sweep" >"$results/sweep.txt"

for figure in timeline cdf; do
    "$tasuki" plot "$figure" "$results/one" -o "$images/$figure.png"
done
"$tasuki" plot ttft "$results/batch" -o "$images/ttft.png"
for figure in phases load goodput pareto; do
    "$tasuki" plot "$figure" "$results/sweep" -o "$images/$figure.png"
done
"$1/bin/python" tools/fill_benchmarking_page.py "$results"
