"""The pipe between rank 0 and the transfer thread of another rank of the same worker.

A pipe of its own, read by a thread of its own on either side: an order never
waits for a step of that rank, nor a step for an order.

    rank 0                                          rank r
    engine thread ── PullerCommand ──▶ pipe ──▶ KvRank ──▶ Puller
    inbox ◀── RemoteRanks ◀── pipe ◀── PullerReport ─────────┘

The first message, from rank r, is its `RankPool`; the last, when its transfer
thread has ended, is None.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait

from tasuki.errors import TasukiError
from tasuki.kv.clock import now_s
from tasuki.kv.effects import PullDone
from tasuki.kv.puller import Puller, PullerCommand, PullerReport
from tasuki.kv.transport import Transport, rank_pool
from tasuki.v1 import kv_pb2

log = logging.getLogger(__name__)

_START_S = 60.0


class KvRankError(TasukiError):
    """A rank did not tell of its KV pool, or is gone."""


class KvRank:
    """The KV side of a rank other than 0; lives until rank 0 closes the pipe.

    Args:
        transport: registered with this rank's pool; handed over.
        connection: rank r's end of the pipe; handed over.
    """

    def __init__(self, transport: Transport, connection: Connection) -> None:
        self._connection = connection
        self._puller = Puller(transport, self._report)
        connection.send_bytes(rank_pool(transport).SerializeToString())
        self._puller.start()
        for run in (self._listen, self._watch):
            threading.Thread(target=run, name=f"kv-rank{run.__name__}", daemon=True).start()

    def _report(self, event: PullerReport | None) -> None:
        with contextlib.suppress(OSError):  # rank 0 is gone, so this one ends, too
            self._connection.send(event)

    def _listen(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                self._puller.put(self._connection.recv())
        self._puller.stop()

    def _watch(self) -> None:
        """Without its transfer thread a rank is of no use, and rank 0 must hear of it."""
        self._puller.join()
        self._report(None)


class RemoteRanks(threading.Thread):
    """Rank 0's ends of the pipes; the thread hears all of them and ends when one is gone.

    Args:
        connections: to ranks 1, 2, ... in order; handed over.
        report: called from this thread with what their transfer threads report.

    Raises:
        KvRankError: a rank did not tell of its pool.
    """

    def __init__(
        self, connections: Sequence[Connection], report: Callable[[PullerReport], None]
    ) -> None:
        super().__init__(name="kv-ranks", daemon=True)
        self._connections = connections
        self._report = report
        self._closing = False
        self.pools = [_receive_pool(rank, c) for rank, c in enumerate(connections, start=1)]
        self.put: list[Callable[[PullerCommand], None]] = [
            functools.partial(_send, rank, c) for rank, c in enumerate(connections, start=1)
        ]

    def close(self) -> None:
        """From now on the end of a rank is nothing to speak of."""
        self._closing = True

    def run(self) -> None:
        while True:
            for ready in wait(self._connections):
                assert isinstance(ready, Connection)
                try:
                    event = ready.recv()
                except (EOFError, OSError):
                    event = None
                if event is None:
                    if not self._closing:
                        rank = 1 + self._connections.index(ready)
                        log.error("the KV side of rank %d has ended", rank)
                    return
                self._report(_by_own_clock(event))


def _by_own_clock(event: PullerReport) -> PullerReport:
    """An end as if it were now: a rank of another machine tells times by another clock.

    So it is later than it was, by the way of the message. The fence stays safe: it asks whether
    all had ended by a certain time.
    """
    if not isinstance(event, PullDone):
        return event
    shift_s = now_s() - event.finished_s
    return replace(event, posted_s=event.posted_s + shift_s, finished_s=event.finished_s + shift_s)


def _receive_pool(rank: int, connection: Connection) -> kv_pb2.RankPool:
    try:
        if connection.poll(_START_S):
            return kv_pb2.RankPool.FromString(connection.recv_bytes())
    except (EOFError, OSError) as error:
        raise KvRankError(f"rank {rank} ended before it told of its KV pool") from error
    raise KvRankError(f"rank {rank} did not tell of its KV pool in {_START_S:g} s")


def _send(rank: int, connection: Connection, command: PullerCommand) -> None:
    try:
        connection.send(command)
    except OSError as error:
        raise KvRankError(f"rank {rank} is gone: {error}") from error
