"""What signals do to a worker: the first one drains it, the second one ends it. Asyncio thread."""

from __future__ import annotations

import asyncio
import logging
import queue
import signal
from collections.abc import Callable

from tasuki.worker.loop import Command, DrainOrdered

log = logging.getLogger(__name__)


class Shutdown:
    """Turns SIGTERM and SIGINT into a drain and an end.

    Args:
        loop: Signals are handled here; it runs this thread.
        inbox: Of the engine thread, which knows when nothing is left.
        drain_s: The drain's limit, in seconds; 0: no drain.
        on_drain: Called when the drain begins.
        finish: Called when the worker is to end, maybe more than once.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        inbox: queue.SimpleQueue[Command],
        drain_s: float,
        on_drain: Callable[[], None],
        finish: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._inbox = inbox
        self._drain_s = drain_s
        self._on_drain = on_drain
        self._finish = finish
        self._draining = False

    def listen(self) -> None:
        """From now on signals are handled here."""
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self.on_signal)

    def on_signal(self) -> None:
        """Begin the drain, or end it."""
        if self._draining:
            self._finish()
        else:
            self.drain()

    def drain(self) -> None:
        """Begin the drain, if it has not begun."""
        if self._drain_s == 0.0:
            self._finish()
            return
        if self._draining:
            return
        self._draining = True
        log.info(
            "draining: no new requests, what runs may take %g s (--drain-s); a second signal"
            " ends the worker at once",
            self._drain_s,
        )
        self._on_drain()
        self._inbox.put(DrainOrdered(self._on_drained))
        self._loop.call_later(self._drain_s, self._on_limit)

    def _on_drained(self) -> None:
        """Nothing is left; called from the engine thread."""
        log.info("drained")
        self._loop.call_soon_threadsafe(self._finish)

    def _on_limit(self) -> None:
        log.warning(
            "requests or leases are left after --drain-s %g: routers place them again",
            self._drain_s,
        )
        self._finish()
