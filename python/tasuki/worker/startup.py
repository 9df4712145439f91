"""How long each part of a worker's start took, told in one line at its end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tasuki.models.cache import cache_root

_COMPILERS = (
    ("FLASHINFER_WORKSPACE_BASE", ""),
    ("TRITON_CACHE_DIR", "triton"),
    ("TORCHINDUCTOR_CACHE_DIR", "inductor"),
)


class Phases:
    """The parts of a start, in order.

    Args:
        begun_s: When it began, on `clock`.
        clock: Seconds.
    """

    def __init__(self, begun_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._begun_s = begun_s
        self._clock = clock
        self._took: dict[str, float] = {}

    def until_now(self, name: str) -> None:
        """All since the beginning was `name`."""
        self._took[name] = self._clock() - self._begun_s

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What the block takes is `name`; blocks of one name add up."""
        started_s = self._clock()
        try:
            yield
        finally:
            took_s = self._clock() - started_s
            self._took[name] = self._took.get(name, 0.0) + took_s

    def summary(self) -> str:
        """E.g. `started in 21.3 s: imports 6.2, weights 9.8, pool 1.0, other 4.3`."""
        total_s = self._clock() - self._begun_s
        parts = dict(self._took, other=max(0.0, total_s - sum(self._took.values())))
        told = ", ".join(f"{name} {took_s:.1f}" for name, took_s in parts.items())
        return f"started in {total_s:.1f} s: {told}"


def process_begun_s() -> float:
    """When this process was started, on the monotonic clock (Linux; else: now)."""
    try:
        after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        since_boot_s = int(after_name[19]) / os.sysconf("SC_CLK_TCK")
        # Both clocks after the file, one right after the other: reading it may take a while.
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot_s
        return time.monotonic() - max(0.0, age_s)
    except (OSError, ValueError, IndexError, AttributeError):
        return time.monotonic()


def keep_compiled() -> None:
    """Let FlashInfer, Triton and torch keep what they compile in Tasuki's cache folder.

    They are compiled once per machine and version, not once per start: call
    this before any of them is imported. Folders that the user has set stay.
    """
    root = cache_root() / "compiled"
    for variable, folder in _COMPILERS:
        os.environ.setdefault(variable, str(root / folder))
