#!/usr/bin/env bash
# Runs GPU tests with another compute capability, or the absence of FlashInfer, reported to what
# chooses kernels and tiles (python/tasuki/device_limits.py). Kernels are compiled for the GPU
# that is there: what other GPUs compile to is the business of `make test-kernels`.
#   tools/gpu_emulated.sh [FOLDER]    keeps one log for each variant; VARIANTS chooses some
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:-benchmarks/results/gpu_emulated}
read -ra variants <<<"${VARIANTS:-8.0 8.9 12.0 no-flashinfer}"
export LIMIT_S=${LIMIT_S:-1200}
kernels=$'test_attention -k not(other_head_dims)and(not(test_mixed_steps_in_cuda_graphs[256))
test_gpu_engine test_gpu_gemms test_own_attention
test_models'
without=$'test_gpu_engine test_own_attention\ntest_serving'

mkdir -p "$folder"
jobs=()
for variant in "${variants[@]}"; do
  if [ "$variant" = no-flashinfer ]; then
    TASUKI_EMULATE_NO_FLASHINFER=1 PARTS=$without tools/gpu_suite.sh "$folder/$variant.log" &
  else
    TASUKI_EMULATE_CAPABILITY=$variant PARTS=$kernels tools/gpu_suite.sh "$folder/$variant.log" &
  fi
  jobs+=("$!")
done
status=0
for job in "${jobs[@]}"; do wait "$job" || status=1; done
for variant in "${variants[@]}"; do echo "$variant: $(tail -n 1 "$folder/$variant.log")"; done
exit "$status"
