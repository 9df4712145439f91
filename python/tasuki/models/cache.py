"""Where Tasuki keeps what it fetched: one folder per user, no state in memory."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tasuki.errors import TasukiError


class CacheError(TasukiError):
    """There is no place for the cache folder."""


def cache_root() -> Path:
    """The cache folder: `TASUKI_CACHE`, else `XDG_CACHE_HOME/tasuki`, else `~/.cache/tasuki`.

    Raises:
        CacheError: It is in a home folder that is not known.
    """
    own, xdg = os.environ.get("TASUKI_CACHE"), os.environ.get("XDG_CACHE_HOME")
    folder = Path(own or (f"{xdg}/tasuki" if xdg else "~/.cache/tasuki"))
    try:
        return folder.expanduser()
    except RuntimeError as error:
        raise CacheError(
            f"the cache folder is {folder}, and no such home folder is known: set TASUKI_CACHE to a"
            " folder that can be written"
        ) from error


def models_dir() -> Path:
    """The folder that holds one folder per fetched model."""
    return cache_root() / "models"


@contextmanager
def exclusive(lock_path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold the lock file for the length of the block; it dies with its holder.

    Args:
        lock_path: File to lock; created if missing, never removed.
        on_wait: Called once if another process holds the lock.
    """
    lock_path.parent.mkdir(parents=True, exist_ok=True)
    with lock_path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
