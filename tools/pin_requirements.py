"""Pins the newest requirements that fit pyproject.toml, without index addresses.

The development file is the superset of the runtime file, which it constrains, so
that serving and testing use the same versions. The GPU file adds the extra `gpu`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_COMPILE = ["pip", "compile", "--quiet", "--upgrade", "--universal", "--python-version", "3.11"]
_PLAIN = ["--no-emit-index-url", "--no-emit-find-links", "--no-annotate", "pyproject.toml"]


def main() -> int:
    """Write requirements-dev.txt, requirements.txt and requirements-gpu.txt."""
    checkout = Path(__file__).resolve().parent.parent
    uv = str(Path(sys.executable).parent / "uv")
    if not Path(uv).exists():
        print("pinning needs uv in .venv: .venv/bin/python -m pip install uv", file=sys.stderr)
        return 1
    environment = {**os.environ, "UV_CUSTOM_COMPILE_COMMAND": "make requirements"}
    pinned = ["--constraint", "requirements-dev.txt"]
    plot = ["--extra", "plot"]
    dev = [*plot, "--group", "pyproject.toml:dev", "--output-file", "requirements-dev.txt"]
    runtime = [*plot, *pinned, "--output-file", "requirements.txt"]
    gpu = ["--extra", "gpu", *pinned, "--output-file", "requirements-gpu.txt"]
    for more in (dev, runtime, gpu):
        subprocess.run([uv, *_COMPILE, *_PLAIN, *more], cwd=checkout, env=environment, check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
