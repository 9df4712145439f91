"""Slow workers, so that requests outlast what a test does to them.

A tiny model answers 300 tokens in a second: on a quick machine, or while the test does not
get to run, everything is over before the fault. Each step of a slowed worker takes longer
until the test says otherwise. All else of the worker is real.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

SLOW_STEP_S = 0.05  # an answer of 300 tokens takes at least 15 s


class Pace:
    """The pace of some workers.

    Args:
        folder: where files tell them; a file for each role.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def modules(self, *names: str) -> dict[str, Sequence[str]]:
        """`Options.modules` for workers of these names, such as `decode-0`."""
        fault = ("support.faulty_worker", "pace")
        return {name: (*fault, str(self._folder / name.partition("-")[0])) for name in names}

    @contextlib.contextmanager
    def slow(self, role: str) -> Iterator[None]:
        """Steps of the workers of this role take `SLOW_STEP_S` more within the block."""
        switch = self._folder / role
        switch.write_text(str(SLOW_STEP_S))
        try:
            yield
        finally:
            switch.unlink()
