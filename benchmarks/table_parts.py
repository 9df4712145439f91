"""What the tables of RESULTS.md are made of: result files, rows, and where a table comes from."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
Result = dict[str, Any]


def load(name: str) -> Result:
    """A result file, by its name without `.json`."""
    return dict(json.loads((RESULTS / f"{name}.json").read_text()))


def rows(heads: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    body = [heads, ["---"] * len(heads), *lines]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in body)


def source(name: str) -> str:
    """The line above a table: command, file, revision, machine."""
    result = load(name)
    command = result.get("command", "")
    words = shlex.join(command) if isinstance(command, list) else command
    revision = str(result.get("git_revision") or result.get("revision") or "not recorded")[:12]
    if result.get("git_dirty"):
        revision += " with local changes"
    machine = result.get("machine", {})
    gpus = machine.get("gpus") or []
    where = f"{len(gpus)} x {gpus[0]}" if gpus else machine.get("cpu", "not recorded")
    cores = machine.get("cores")
    where += f", {cores:g} cores" if cores else ""
    return f"`{words}` → [{name}.json](results/{name}.json); revision {revision}; {where}\n\n"


def number(value: float | None, digits: int = 1) -> str:
    """With thousands separated; nothing for None."""
    return "" if value is None else f"{value:,.{digits}f}"
