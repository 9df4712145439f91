"""Failures that end a worker: reported from any thread, told in one line, never survived.

    engine thread, ranks, watchdog ──put──┐
    any other thread (excepthook) ────────┼──▶ Failures ──▶ log line ──▶ orderly end ──▶ exit 1
    background tasks (background.py) ─────┘                                └─ at most END_S

The launcher starts the worker again, and routers place its requests elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from tasuki.background import FAILED_TASK
from tasuki.engine.errors import kind_of
from tasuki.errors import ERROR_PREFIX

log = logging.getLogger(__name__)

_START_S = 5.0  # for the main thread to raise its own error while the worker starts
END_S = 10.0  # from a failure to the end of the process, whatever still hangs


class Failures:
    """What ended a part of the worker. The first failure ends the process.

    While the worker starts, its main thread may be in a collective that a rank has
    left, where nothing can reach it: the process then ends from here.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._handle: Callable[[], None] | None = None
        self._first: BaseException | None = None

    def put(self, error: BaseException) -> None:
        """Take an error that the worker cannot go on with; any thread."""
        with self._lock:
            first, handle = self._first is None, self._handle
            self._first = self._first or error
        if handle is not None:
            if first:
                self._end(error, handle)
            return
        time.sleep(_START_S)
        if self._handle is None:
            print(f"{ERROR_PREFIX}{error}", file=sys.stderr, flush=True)
            os._exit(1)

    def serve(self, handle: Callable[[], None]) -> None:
        """The worker serves from now on.

        Args:
            handle: Begins the orderly end; any thread, must not wait. Called once.
        """
        with self._lock:
            self._handle, first = handle, self._first
        if first is not None:
            self._end(first, handle)

    def catch_threads(self) -> None:
        """End the worker when an exception escapes from any thread of the process."""
        threading.excepthook = self._on_thread

    def catch_tasks(self, loop: asyncio.AbstractEventLoop) -> None:
        """End the worker when a task of `background.py` fails in `loop`."""
        loop.set_exception_handler(self._on_task)

    def _end(self, error: BaseException, handle: Callable[[], None]) -> None:
        kind = kind_of(error).value
        log.critical("%r (%s failure): this worker ends, to be started anew", error, kind)
        timer = threading.Timer(END_S, os._exit, (1,))
        timer.daemon = True
        timer.start()
        handle()

    def _on_thread(self, escaped: threading.ExceptHookArgs) -> None:
        error = escaped.exc_value
        if error is None:
            return
        name = "?" if escaped.thread is None else escaped.thread.name
        log.error("thread %s failed", name, exc_info=error)
        self.put(error)

    def _on_task(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if context.get("message") != FAILED_TASK:  # of a library, which goes on
            loop.default_exception_handler(context)
            return
        error = context["exception"]
        log.error("task %s failed", context["name"], exc_info=error)
        self.put(error)
