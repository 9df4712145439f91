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
    deadline_s: float = 60.0,
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


def idle_shares(
    used_s: Callable[[], dict[str, float]], most: float, *, window_s: float = 4.0, windows: int = 6
) -> dict[str, float]:
    """Shares of a core that some threads or processes use, in the first window without work.

    What polls does so in every window; what else a process has to do ends.

    Args:
        used_s: processor seconds of each so far, by name.
        most: a window counts if no share is larger.
        window_s: length of a window.
        windows: how many to look at.

    Raises:
        AssertionError: every window had a larger share; the message has all of them.
    """
    seen = []
    for _ in range(windows):
        before, begin_s = used_s(), time.monotonic()
        time.sleep(window_s)  # the window of the measurement
        wall_s = time.monotonic() - begin_s
        seen.append({name: (after - before[name]) / wall_s for name, after in used_s().items()})
        if max(seen[-1].values()) < most:
            return seen[-1]
    raise AssertionError(f"more than {most:.0%} of a core in each of {windows} windows: {seen}")


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
