"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path


def is_device(path: Path) -> bool:
    """Whether it is a device or a pipe, such as /dev/null, which no file may replace."""
    return path.exists() and not path.is_file()


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Have a file written, in a folder that is made, or leave what is there as it is.

    A link stays one, and a device is written to.

    Args:
        path: Of the file.
        write: Writes all of it to the path that it is given, which ends as `path` does.

    Raises:
        OSError: It cannot be written.
    """
    if is_device(path):
        write(path)
        return
    target = path.resolve()
    part = target.with_name(f".{os.getpid()}-{target.name}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write(part)
        part.replace(target)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink()  # a full disk needs the room
        raise
