"""Notices an engine that makes no progress: a step that never ends, a call that never returns.

    engine thread ── progress() ──▶ Watchdog ── nothing for limit_s ──▶ on_stuck: the worker ends
                                        └──── late: a third of that ──▶ routers hear nothing more

One clock covers both forms of a hang: a device that never finishes a step, while
the engine thread goes on asking, and a call that keeps the engine thread (a step on
the CPU, a collective that a rank has left, a synchronization).

Time is counted in the watchdog's own ticks, not by a clock: a process that was
suspended has not been stuck.
"""

from __future__ import annotations

import faulthandler
import sys
import threading
from collections.abc import Callable

from tasuki.errors import TasukiError

_TICK_S = 0.25
_LATE = 1 / 3  # of the limit; the rest is for routers to stop sending requests


class StuckError(TasukiError):
    """The engine has made no progress for longer than its step may take."""


class Watchdog(threading.Thread):
    """Watches one engine thread.

    Args:
        limit_s: How long the step under way may take; read at every tick.
        on_stuck: Called once, from this thread.
    """

    def __init__(
        self, limit_s: Callable[[], float], on_stuck: Callable[[StuckError], None]
    ) -> None:
        super().__init__(name="watchdog", daemon=True)
        self._limit_s = limit_s
        self._on_stuck = on_stuck
        self._steps = 0
        self._progress = 0
        self._silent_s = 0.0
        self._stopped = threading.Event()

    def progress(self, steps: int, in_flight: bool) -> None:
        """Say that the engine thread is not stuck in a call; engine thread, at every turn.

        Args:
            steps: Collected so far.
            in_flight: Whether a launched step is not collected: then only a
                collected step is progress.
        """
        if not in_flight or steps != self._steps:
            self._steps = steps
            self._progress += 1

    @property
    def late(self) -> bool:
        """Whether the engine has been without progress for suspiciously long; any thread."""
        return self._silent_s > _LATE * self._limit_s()

    def stop(self) -> None:
        """The engine thread ends; nothing is watched any more."""
        self._stopped.set()

    def run(self) -> None:
        seen = -1
        while not self._stopped.wait(_TICK_S):
            if self._progress != seen:
                seen, self._silent_s = self._progress, 0.0
                continue
            self._silent_s += _TICK_S
            limit_s = self._limit_s()
            if self._silent_s >= limit_s:
                faulthandler.dump_traceback(sys.stderr, all_threads=True)
                self._on_stuck(
                    StuckError(
                        f"the engine has made no progress for {self._silent_s:g} s, the limit of"
                        f" its step is {limit_s:g} s (--step-timeout-s): the device or a rank hangs"
                    )
                )
                return
