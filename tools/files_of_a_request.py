"""Lists the Python files that a split request passes: the count in ARCHITECTURE.md.

    python tools/files_of_a_request.py

A prefill worker, a decode worker and a router serve a tiny Llama in bfloat16 on the CPU. Three
completions with sampling are sent, one after the other. In both workers a profiler hook notes the
files whose functions run; those of the third completion are listed, since the first ones also run
what is done once. The router is Rust, and the kernels of a GPU do not run here.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "python" / "tasuki"
COMPLETIONS = 3


def main() -> None:
    """Serve the completions, and print what the last one ran."""
    sys.path.append(str(ROOT / "tests"))
    os.environ["PYTHONPATH"] = str(ROOT / "tools")
    from support.deployment import Deployment, Options
    from support.models import save_tiny_model

    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        number = directory / "number"
        number.write_bytes(bytes(1))
        noted = {name: directory / f"{name}.files" for name in ("prefill-0", "decode-0")}
        options = Options(
            save_tiny_model(directory / "model"),
            prefill=1,
            decode=1,
            worker=("--kv-memory", "64000000"),
            dtype="bfloat16",
            router=("--strict-roles",),
            modules={
                name: ("files_of_a_request", str(number), str(path)) for name, path in noted.items()
            },
        )
        deployment = Deployment.launch(options, directory)
        try:
            for index in range(1, COMPLETIONS + 1):
                deployment.wait_idle()
                set_number(number, index)
                prompt = [3 + (7 * index + token) % 500 for token in range(200)]
                deployment.http.complete(prompt, max_tokens=8, temperature=0.8, seed=index)
            deployment.wait_idle()
            set_number(number, COMPLETIONS + 1)  # what is done at the end is not counted
        finally:
            deployment.shut_down()
        show({name: read(path) for name, path in noted.items()})


def set_number(number: Path, index: int) -> None:
    """Say which completion comes; in place, since the workers have the file mapped."""
    with number.open("r+b") as file:
        file.write(bytes([index]))


def read(noted: Path) -> set[str]:
    """The files that a worker noted for the last completion."""
    lines = (line.split(maxsplit=1) for line in noted.read_text().splitlines())
    return {path for index, path in lines if int(index) == COMPLETIONS}


def show(files: dict[str, set[str]]) -> None:
    """Print all files with the workers in which they run, and how many there are."""
    every = sorted(set.union(*files.values()))
    for path in every:
        print(f"{path:32}", *(name for name, ran in files.items() if path in ran))
    folders = Counter(path.rpartition("/")[0] or "." for path in every)
    print(", ".join(f"{folder} {count}" for folder, count in folders.most_common()))
    print(f"{len(every)} files:", ", ".join(f"{name} {len(ran)}" for name, ran in files.items()))


def note_files(number: Path, noted: Path) -> None:
    """Note each file whose functions run in this process, once for each completion.

    Args:
        number: Its first byte is the number of the completion under way.
        noted: Gets a line with number and file.
    """
    with number.open("rb") as file:
        current = mmap.mmap(file.fileno(), 1, prot=mmap.PROT_READ)
    out = os.open(noted, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    seen: set[tuple[int, str]] = set()

    def hook(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        key = current[0], code.co_filename
        if event == "call" and key not in seen:
            seen.add(key)
            path = Path(code.co_filename)
            if path.is_relative_to(PACKAGE):
                os.write(out, f"{key[0]} {path.relative_to(PACKAGE)}\n".encode())

    threading.setprofile(hook)
    sys.setprofile(hook)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        main()
    else:  # a worker: where to note, and the arguments of `tasuki`
        note_files(Path(sys.argv[1]), Path(sys.argv[2]))
        sys.argv[1:3] = []
        from tasuki.cli import main as tasuki

        tasuki()
