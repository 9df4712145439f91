"""Where a result file comes from: command, revision, versions, machine, and a digest of it all."""

from __future__ import annotations

import hashlib
import importlib.metadata
import itertools
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from tasuki.bench.arguments import words_without_secrets
from tasuki.processor import cpu_name, usable_cores

DIGEST = "digest"
_CHECKOUT = Path(__file__).resolve().parents[3]
_PACKAGES = (
    "tasuki",
    "torch",
    "triton",
    "transformers",
    "flashinfer-python",
    "nixl-cu12",
    "nixl-cu13",
    "numpy",
)


def own_command() -> list[str]:
    """This process's command line, to be repeated from the checkout's folder.

    Of an absolute path after `--output` there is only the file's name, and keys are hidden.
    """
    program = Path(sys.argv[0]).resolve()
    arguments = [
        Path(word).name if before == "--output" and Path(word).is_absolute() else word
        for before, word in itertools.pairwise(["", *words_without_secrets(sys.argv[1:])])
    ]
    if program.suffix != ".py":
        return ["tasuki", *arguments]
    inside = program.is_relative_to(_CHECKOUT)
    name = str(program.relative_to(_CHECKOUT)) if inside else program.name
    return ["python", name, *arguments]


@cache
def git_revision() -> str | None:
    """Commit of the checkout that this code runs from; None if it is an installed package."""
    said = _git("rev-parse", "--short=12", "HEAD")
    return said.strip() if said else None


@cache
def git_dirty() -> bool | None:
    """Whether tracked files of the checkout differ from its commit; None without a checkout.

    The results themselves do not count: one benchmark writes while the next one runs.
    """
    said = _git("status", "--porcelain", "--untracked-files=no", "--", ":!benchmarks/results")
    return None if said is None else bool(said.strip())


@cache
def versions() -> dict[str, str]:
    """Python's version and those of the installed packages that a measurement depends on."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


@cache
def machine() -> dict[str, Any]:
    """Processor, memory and GPUs that this process may use."""
    return {
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": _gpus(),
        "os": f"{platform.system()} {platform.release()}",
    }


def digest(result: Mapping[str, Any]) -> str:
    """SHA-256 of a result without its digest: tells a file that was edited afterwards."""
    content = {key: value for key, value in result.items() if key != DIGEST}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=_CHECKOUT, capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == 0 else None


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
