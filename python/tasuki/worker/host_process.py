"""A host of a worker other than the first: starts its ranks, and ends with the worker.

It connects each rank to the first host and hands it the connections. It has no settings of
its own: the first host sends them to each rank.

SIGTERM or SIGINT while the worker serves is passed on to the first host, which drains the worker
(`shutdown.py`). Before that, and the second time, it ends this host's ranks at once.

Threads: this one starts the ranks (they follow it: see `follow_parent`), waits and handles
signals; one for each rank and one for the first host tell it of an end.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence

from tasuki.launch.parent_death import PARENT_VARIABLE
from tasuki.worker.hosts import END_ORDER, Hello, Relay, connect, split_first

log = logging.getLogger(__name__)


def run_host(nodes: Sequence[str], number: int, ranks: int, key: bytes) -> int:
    """Run this host's ranks until one of them, or the worker, has ended.

    Args:
        nodes: Of the worker, HOST:PORT first, then hosts.
        number: This one's, 1 or more.
        ranks: Of the whole worker.
        key: That all hosts have.

    Returns:
        The exit code: 0 if the worker ended or a signal ended this host, 1 if a rank failed.

    Raises:
        HostsError: The first host cannot be reached, or has another key.
    """
    host, port = split_first(nodes[0])
    each = ranks // len(nodes)
    relay = Relay(host, port, key)
    alive = connect(host, port, key, Hello("alive", number))
    ends: queue.SimpleQueue[int] = queue.SimpleQueue()

    def tell_end(process: subprocess.Popen[bytes]) -> None:
        ends.put(process.wait())

    processes = []
    for index in range(each):
        rank = number * each + index
        pipes = [connect(host, port, key, Hello(kind, rank)) for kind in ("orders", "kv")]
        place = (nodes[number], str(relay.port), str(index))
        environment = {**os.environ, PARENT_VARIABLE: str(os.getpid())}
        handles = [pipe.fileno() for pipe in pipes]
        words = [sys.executable, "-m", "tasuki.worker.rank_process", *map(str, handles), *place]
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, pass_fds=handles, env=environment
        )
        for pipe in pipes:
            pipe.close()  # else the first host would not notice the rank's end
        processes.append(process)
        threading.Thread(target=tell_end, args=(process,), daemon=True).start()
        log.info("rank %d runs here, pid %d", rank, process.pid)

    serves, told = threading.Event(), threading.Event()

    def watch() -> None:
        try:
            while True:
                alive.recv()
                serves.set()
        except (EOFError, OSError):
            ends.put(0)

    def on_signal(*_: object) -> None:
        if not serves.is_set() or told.is_set():
            ends.put(0)
            return
        told.set()
        log.info("told to end: the first host drains the worker; a second signal ends it at once")
        with contextlib.suppress(OSError):  # `watch` hears of that
            alive.send(END_ORDER)

    for order in (signal.SIGTERM, signal.SIGINT):
        signal.signal(order, on_signal)
    threading.Thread(target=watch, name="alive", daemon=True).start()
    code = ends.get()
    for process in processes:
        process.kill()
        process.wait()
    return 1 if code else 0
