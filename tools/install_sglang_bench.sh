#!/usr/bin/env bash
# Installs SGLang's load generator into a virtual environment of its own, as `make test-clients`
# needs it: SGLang itself without its requirements (some GB of CUDA kernels), and what importing
# the load generator needs. torch and transformers are those of .venv.
#   tools/install_sglang_bench.sh FOLDER VENV
set -euo pipefail
folder=$1
venv=$2
version=0.5.23
[ -e "$folder/.installed-$version" ] && exit 0
"$venv/bin/python" -m venv "$folder"
site() { "$1/bin/python" -c 'import site; print(site.getsitepackages()[0])'; }
site "$venv" > "$(site "$folder")/runtime.pth"
"$folder/bin/pip" install --quiet --disable-pip-version-check --no-deps "sglang==$version"
"$folder/bin/pip" install --quiet --disable-pip-version-check apache-tvm-ffi aiohttp \
    compressed-tensors datasets fastapi ipython msgspec orjson pybase64 pyzmq requests torchvision tqdm
touch "$folder/.installed-$version"
