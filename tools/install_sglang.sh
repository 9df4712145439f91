#!/usr/bin/env bash
# Installs SGLang into a virtual environment of its own, as `make test-sglang` needs it. Without a
# GPU it runs its own torch code, so what it requires for CUDA is left out; its package of kernels,
# which is built for CUDA only, is replaced by one in which every kernel has a name and none runs.
#   tools/install_sglang.sh FOLDER
set -euo pipefail
folder=$1
version=0.5.23
python=${2:-python3}
bin=$folder/venv/bin

install() {
    mkdir -p "$folder"
    "$python" -m venv "$folder/venv"
    "$bin/pip" install --quiet --disable-pip-version-check uv
    "$bin/pip" download --quiet --disable-pip-version-check --no-deps --dest "$folder" \
        "sglang==$version"
    requirements > "$folder/requirements.txt"
    export VIRTUAL_ENV=$folder/venv
    "$bin/uv" pip install --quiet -r "$folder/requirements.txt" mooncake-transfer-engine-non-cuda
    "$bin/uv" pip install --quiet --no-deps "$folder"/sglang-*.whl
    cp -r "$(dirname "$0")/sglang_on_cpu/sgl_kernel" \
        "$("$bin/python" -c 'import site; print(site.getsitepackages()[0])')/"
    touch "$folder/.installed-$version"
}

requirements() {
    "$bin/python" - "$folder" <<'PYTHON'
import pathlib, re, sys, zipfile
wheel, = pathlib.Path(sys.argv[1]).glob("sglang-*.whl")
with zipfile.ZipFile(wheel) as archive:
    name, = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
    lines = archive.read(name).decode().splitlines()
wanted = [line.split(":", 1)[1].strip() for line in lines if line.startswith("Requires-Dist:")]
of_cuda = (
    "cuda flash flashinfer humming nvidia nvshmem4py quack sgl sglang tilelang"
    " torchaudio torchcodec torch_memory_saver"
).split()
for one in wanted:
    name = re.split(r"[^\w.-]", one)[0]
    if "extra ==" not in one and name not in of_cuda and name.split("-")[0] not in of_cuda:
        print(one)
PYTHON
}

[ -e "$folder/.installed-$version" ] || install
"$bin/python" -c 'import mooncake.engine' || {
    echo "Mooncake does not load: for libibverbs.so.1," \
        "apt-get install --no-install-recommends libibverbs1" >&2
    exit 1
}
