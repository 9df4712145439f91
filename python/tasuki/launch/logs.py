"""The folder for the processes' logs: thrown away after a clean end, kept after a crash."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tasuki.launch.errors import LaunchError
from tasuki.models.cache import cache_root, exclusive

KEPT_FOLDERS = 20


@dataclass(slots=True)
class Logs:
    """Where the logs are.

    Attributes:
        path: The folder.
        keep: Whether it stays; set by whoever knows how things ended.
    """

    path: Path
    keep: bool = True


@contextmanager
def log_folder(wanted: Path | None) -> Iterator[Logs]:
    """A folder for logs; after the block it goes unless `keep` or asked for.

    Args:
        wanted: Always kept; None: a new folder in the cache.

    Raises:
        LaunchError: The folder cannot be made, or another launcher has it.
    """
    with ExitStack() as held:
        try:
            logs = Logs(_make(wanted))
            held.enter_context(exclusive(logs.path / ".lock", lambda: _refuse(logs.path)))
        except OSError as error:
            raise LaunchError(
                f"cannot write logs: {error}; choose a folder: --log-dir DIR, or set TASUKI_CACHE"
                " to one that can be written"
            ) from error
        try:
            yield logs
        finally:
            if wanted is None and not logs.keep:
                shutil.rmtree(logs.path, ignore_errors=True)


def _refuse(folder: Path) -> None:
    raise LaunchError(f"another launcher writes to {folder}; choose another folder: --log-dir DIR")


def _make(wanted: Path | None) -> Path:
    if wanted is not None:
        wanted.mkdir(parents=True, exist_ok=True)
        return wanted
    parent = cache_root() / "logs"
    parent.mkdir(parents=True, exist_ok=True)
    _remove_old(parent)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    return Path(tempfile.mkdtemp(prefix=f"{stamp}-{os.getpid()}-", dir=parent))


def _remove_old(parent: Path) -> None:
    """Leave the newest of the kept folders, and those of launchers that still run."""
    folders = sorted(path for path in parent.iterdir() if path.is_dir())
    for old in folders[: -KEPT_FOLDERS + 1]:
        # Its launcher's number would tell nothing: in containers many have the same.
        with suppress(LaunchError, OSError), exclusive(old / ".lock", partial(_refuse, old)):
            shutil.rmtree(old, ignore_errors=True)
