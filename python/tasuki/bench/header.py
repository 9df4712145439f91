"""What every result file begins with, and how one is written and read."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tasuki.bench.errors import RunFailedError
from tasuki.launch.machine import usable_cores

SCHEMA = "tasuki.bench/1"


def header(
    kind: str,
    *,
    command: Sequence[str],
    label: str,
    topology: Mapping[str, Any] | None,
    model: str,
) -> dict[str, Any]:
    """The fields that all kinds of result files share.

    Args:
        kind: Of the file.
        command: As the user typed it, from `tasuki` on.
        label: Names the line in plots.
        topology: See `Target.describe`; None: unknown.
        model: As requests call it.
    """
    return {
        "schema": SCHEMA,
        "kind": kind,
        "created": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command": list(command),
        "label": label,
        "topology": topology,
        "model": model,
        "git_revision": _git_revision(),
        "version": importlib.metadata.version("tasuki"),
        "machine": machine(),
    }


def own_command() -> list[str]:
    """This process's command line, to be repeated: paths of programs are left out."""
    program = Path(sys.argv[0])
    if program.suffix == ".py":  # one of benchmarks/
        return ["python", program.name, *sys.argv[1:]]
    return ["tasuki", *sys.argv[1:]]


@cache
def machine() -> dict[str, Any]:
    """Processor, memory and GPUs that this process may use."""
    return {
        "cpu": _cpu(),
        "cores": usable_cores(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": _gpus(),
        "os": f"{platform.system()} {platform.release()}",
    }


def write_result(path: Path, result: Mapping[str, Any]) -> None:
    """Write whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    part.replace(path)


def read_result(path: Path, kind: str) -> dict[str, Any]:
    """Read a result file.

    Raises:
        RunFailedError: It is not there, broken, or of another kind.
    """
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunFailedError(f"no result in {path}: {error}") from error
    found = result.get("kind") if isinstance(result, dict) else None
    if found != kind or result.get("schema") != SCHEMA:
        raise RunFailedError(f"{path} is no {SCHEMA} result of kind {kind}: its kind is {found!r}")
    return dict(result)


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _gpus() -> list[str]:
    """Names of the GPUs that CUDA programs started here would see."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = [program, "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    names = done.stdout.split("\n")[:-1]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return names if visible is None else names[: len([d for d in visible.split(",") if d.strip()])]


@cache
def _git_revision() -> str | None:
    """Of the checkout that this code runs from; None if it is an installed package."""
    here = Path(__file__).resolve().parent
    try:
        done = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"],
            cwd=here,
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
