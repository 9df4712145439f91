"""Where workers run: the interface; `local.py` has this machine, `on_ray.py` a Ray cluster.

An engine finds places for workers and runs their processes. Everything else is the same
for all engines: readiness, restarts, the workers file, scaling, the end.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Protocol

from tasuki.launch.forking import Process
from tasuki.launch.topology import ProcessSpec

Member = tuple[str, str]
"""A worker's name and role."""

Wait = Callable[[float], None]
"""Waits for so many seconds at most, and handles events meanwhile."""


class Engine(Protocol):
    """Places for workers, and processes at these places."""

    def settle_dtype(self, model: Path) -> str:
        """The one dtype of all workers, said with its reason."""

    def place(
        self, model: Path, dtype: str, members: Sequence[Member] | None, wait: Wait
    ) -> tuple[ProcessSpec, ...]:
        """Find a place for each worker.

        Args:
            model: The model's folder on this machine.
            dtype: As settled.
            members: Workers that join those that have a place; None: the whole topology.
            wait: Called while others have the places.

        Raises:
            LaunchError: There is no room for them; they have no place then.
            Exception: What `wait` raises; they have no place then either.
        """

    def start(self, spec: ProcessSpec, output: int) -> Process:
        """Start a process: a worker at its place, any other one on this machine.

        Args:
            spec: What to start.
            output: Handle for its output, errors too; the caller closes it.

        Raises:
            OSError: The system cannot start it.
        """

    def release(self, names: Collection[str]) -> None:
        """Others may have the places of these workers, which have ended."""

    def interrupt(self) -> None:
        """The launcher ends: a `start` that waits fails, and none succeeds any more."""

    def close(self) -> None:
        """Give everything back; all processes have ended."""
