"""Settles what all workers must agree on: the dtype.

`settle_dtype` runs the measurement in a process of its own (so the launcher
needs no torch) before the workers start (so nothing disturbs it), and keeps the
answer in the cache: it depends on model, machine and torch only.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from tasuki.launch.errors import LaunchError
from tasuki.launch.parent_death import PARENT_VARIABLE, follow_parent
from tasuki.models import cache
from tasuki.processor import cpu_name

_FILE = "dtype.json"
_CHOICE = "kernels for each processor, with AMX"  # change it when the choice is made by other rules


def settle_dtype(
    model: Path,
    wanted: str,
    environment: Mapping[str, str],
    on_measure: Callable[[], None] = lambda: None,
) -> tuple[str, str]:
    """The dtype for all workers, and why.

    Args:
        model: Local model folder.
        wanted: `auto` measures; anything else is the answer.
        environment: The workers' variables (threads).
        on_measure: Called before the measurement, if there is one.

    Raises:
        LaunchError: The model is refused, with the reason.
    """
    if wanted != "auto":
        return wanted, f"{wanted}: as asked for"
    try:
        key = _key(model, environment)
    except OSError as error:
        raise LaunchError(f"cannot serve {model}: {error}; make it readable") from error
    known = _load()
    if key in known:
        dtype, reason = known[key]
        return dtype, f"{reason} (measured earlier; --dtype chooses)"
    on_measure()
    done = subprocess.run(
        [sys.executable, "-m", "tasuki.launch.settle", str(model)],
        env={**environment, **os.environ, PARENT_VARIABLE: str(os.getpid())},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        tail = "\n".join(f"  {line}" for line in done.stderr.splitlines()[-15:])
        raise LaunchError(f"cannot serve {model}:\n{tail}")
    dtype, reason = json.loads(done.stdout.splitlines()[-1])
    _store({**known, key: (dtype, reason)})
    return dtype, reason


def _key(model: Path, environment: Mapping[str, str]) -> str:
    facts = [
        _CHOICE,
        hashlib.sha256((model / "config.json").read_bytes()).hexdigest(),
        importlib.metadata.version("torch"),
        platform.node(),
        cpu_name(),
        os.environ.get("OMP_NUM_THREADS") or environment.get("OMP_NUM_THREADS", ""),
        os.environ.get("TASUKI_CPU_KERNELS", ""),
    ]
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()[:32]


def _load() -> dict[str, tuple[str, str]]:
    try:
        stored = json.loads((cache.cache_root() / _FILE).read_text())
        return {key: (dtype, reason) for key, (dtype, reason) in stored.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def _store(known: dict[str, tuple[str, str]]) -> None:
    path = cache.cache_root() / _FILE
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_name(f"{_FILE}.{os.getpid()}")
        scratch.write_text(json.dumps(known, indent=2) + "\n")
        scratch.replace(path)
    except OSError:
        return  # it will be measured again


def main(arguments: list[str]) -> int:
    """Command line: the model's folder; prints `[dtype, reason]` as JSON."""
    follow_parent()
    import torch

    from tasuki.errors import TasukiError
    from tasuki.models.loader import choose_dtype
    from tasuki.models.spec_reader import read_spec

    try:
        dtype, reason = choose_dtype(read_spec(Path(arguments[0])), torch.device("cpu"))
    except TasukiError as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps([str(dtype).removeprefix("torch."), reason]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
