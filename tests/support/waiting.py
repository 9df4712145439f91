"""Waiting with a deadline, and free ports."""

from __future__ import annotations

import itertools
import os
import random
import socket
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
_ports = itertools.cycle(random.Random(os.getpid()).sample(range(12000, 32000), 20000))


def until(
    probe: Callable[[], T],
    what: str | Callable[[], str],
    *,
    deadline_s: float = 30.0,
    interval_s: float = 0.02,
) -> T:
    """Calls `probe` until it gives something true, and returns that.

    Args:
        probe: asked again and again; an exception counts as a failure of the test.
        what: names what was waited for in the error; called late when callable.
        deadline_s: give up after this.
        interval_s: between two calls.

    Raises:
        TimeoutError: `probe` gave nothing true in time.
    """
    end = time.monotonic() + deadline_s
    while True:
        value = probe()
        if value:
            return value
        if time.monotonic() > end:
            name = what() if callable(what) else what
            raise TimeoutError(f"not within {deadline_s:g} s: {name}")
        time.sleep(interval_s)


def free_port() -> int:
    """A TCP port nobody listens on, below the range that outgoing connections use."""
    for port in _ports:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("unreachable")
