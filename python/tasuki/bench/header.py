"""What every result file begins with, and how one is written and read."""

from __future__ import annotations

import datetime
import errno
import importlib.metadata
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tasuki.bench import provenance
from tasuki.bench.errors import BenchError, RunFailedError
from tasuki.bench.provenance import own_command
from tasuki.whole_file import is_device, write_whole

__all__ = ["SCHEMA", "check_writable", "header", "own_command", "read_result", "write_result"]

SCHEMA = "tasuki.bench/1"


def header(
    kind: str,
    *,
    command: Sequence[str] | None = None,
    label: str,
    topology: Mapping[str, Any] | None,
    model: str,
) -> dict[str, Any]:
    """The fields that all kinds of result files share.

    Args:
        kind: Of the file.
        command: As the user typed it, from `tasuki` or `python` on; None: this process's.
        label: Names the line in plots.
        topology: See `Target.describe`; None: unknown.
        model: As requests call it.
    """
    return {
        "schema": SCHEMA,
        "kind": kind,
        "created": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command": list(own_command() if command is None else command),
        "label": label,
        "topology": topology,
        "model": model,
        "git_revision": provenance.git_revision(),
        "git_dirty": provenance.git_dirty(),
        "version": importlib.metadata.version("tasuki"),
        "versions": provenance.versions(),
        "machine": provenance.machine(),
    }


def check_writable(path: Path) -> None:
    """Refuse a path before a measurement whose result `write_result` could not write there.

    Makes its folder.

    Raises:
        BenchError: It cannot be written.
    """
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if is_device(path):
            return
        folder = path.resolve().parent
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".tasuki-"):
            pass
    except OSError as error:
        raise _not_written(path, error) from error


def write_result(path: Path, result: Mapping[str, Any]) -> None:
    """Write whole or not at all, with a digest of the content as its last field. A link stays one.

    Raises:
        BenchError: It cannot be written.
    """
    content = json.loads(json.dumps(dict(result)))  # as a reader will see it
    content[provenance.DIGEST] = provenance.digest(content)
    text = json.dumps(content, indent=1) + "\n"
    try:
        write_whole(path, lambda part: part.write_text(text, encoding="utf-8"))
    except OSError as error:
        raise _not_written(path, error) from error


def _not_written(path: Path, error: OSError) -> BenchError:
    return BenchError(
        f"cannot write the result to {path} ({error.strerror}): choose a path that can be written"
    )


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
