"""The first rank's hold on the others: it starts them, tells them what to do, hears of their end.

    first rank's engine thread ── orders ──▶ pipe ──▶ rank r (rank_process.py)
    first rank's listener      ◀── reports ── pipe ◀──┘

Ranks on other hosts are started there (host_process.py); in place of a pipe they have an
authenticated connection (hosts.py).

The others end with the first one, however it ends: the kernel kills them, and
their pipe is closed. When one of them ends the worker is of no use: `on_failure`
is told, with that rank's own error.
"""

from __future__ import annotations

import logging
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait

from tasuki.errors import TasukiError
from tasuki.execution.step_arrays import StepHeader
from tasuki.launch.parent_death import PARENT_VARIABLE
from tasuki.worker.hosts import Meeting
from tasuki.worker.rank_messages import (
    CopyOrder,
    Failed,
    Fits,
    Order,
    PoolShape,
    RankPlan,
    Ready,
    Report,
    ScrubOrder,
    StepOrder,
    StopOrder,
)

log = logging.getLogger(__name__)

_LAST_WORDS_S = 2.0  # for a rank's own error to come after what its end has caused here


class RankError(TasukiError):
    """A rank could not start, or has ended."""


class Ranks:
    """The ranks from 1 on; also the engine's `Followers`.

    Args:
        size: Ranks in all.
        threads: Of each, for computing on the CPU.
        on_failure: Called once, from the listener's thread, with the error of a rank
            that ended before `close`.
        meeting: Where ranks of other hosts arrive; None: all are here.
        here: Ranks on this host, the first one included; None: all.

    Attributes:
        kv: A pipe to the KV side of each, for `Handoffs`.
    """

    def __init__(
        self,
        size: int,
        threads: int,
        on_failure: Callable[[RankError], None] = lambda _: None,
        meeting: Meeting | None = None,
        here: int | None = None,
    ) -> None:
        """Start the processes. Must be called by the main thread: see `follow_parent`."""
        self._on_failure = on_failure
        self._closing = False
        self._failure: RankError | None = None
        self._failed = threading.Event()
        self._reports: list[queue.SimpleQueue[Report | RankError]] = []
        self._pipes: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []  # of the ranks on this host
        self._meeting = meeting
        self._hosts = 1 if here is None else size // here
        self.kv: list[Connection] = []
        for rank in range(1, size):
            if here is None or rank < here:
                self._start(threads)
            else:
                self._await(rank)
        self._listener = threading.Thread(target=self._listen, name="ranks", daemon=True)
        self._listener.start()

    @property
    def size(self) -> int:
        """Ranks in all."""
        return 1 + len(self._pipes)

    # The start, on the main thread.

    def build(self, plan: RankPlan) -> None:
        """Have all ranks begin to build what this one builds."""
        if self._meeting is not None:
            self._meeting.store_port = plan.port
        for rank, pipe in enumerate(self._pipes, 1):
            self._send(pipe, replace(plan, rank=rank, device_index=rank))

    def least_available(self, own: int | None) -> int | None:
        """The least of what the ranks' pools may take, this one's included; None on the CPU.

        Raises:
            RankError: One cannot start.
        """
        found = [own]
        for rank in range(1, self.size):
            report = self._report(rank)
            assert isinstance(report, Fits), report
            found.append(report.available_bytes)
        known = [each for each in found if each is not None]
        return min(known, default=None)

    def make_pools(self, shape: PoolShape) -> None:
        """Have all ranks make their pools, and all that follows."""
        for pipe in self._pipes:
            self._send(pipe, shape)

    def await_ready(self) -> None:
        """Wait for all ranks to be built.

        Raises:
            RankError: One cannot start.
        """
        for rank in range(1, self.size):
            report = self._report(rank)
            assert isinstance(report, Ready), report

    def explain(self, error: Exception) -> Exception:
        """The error of a rank that caused `error` here, if one did; else the same."""
        self._failed.wait(_LAST_WORDS_S)
        return self._failure or error

    def watch_hosts(self, on_end_order: Callable[[], object]) -> None:
        """Tell the other hosts, if there are any, that the worker serves.

        Args:
            on_end_order: Called from a thread when one of them was told to end.
        """
        if self._meeting is not None:
            self._meeting.watch(range(1, self._hosts), on_end_order)

    # `Followers`, on the engine thread.

    def run(self, header: StepHeader, slab: memoryview) -> None:
        """See `Followers`."""
        for pipe in self._pipes:
            self._send(pipe, StepOrder(header), slab)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See `Followers`."""
        for pipe in self._pipes:
            self._send(pipe, CopyOrder(tuple(pairs)))

    def scrub(self, blocks: Sequence[int], first_slot: int) -> None:
        """See `Followers`."""
        for pipe in self._pipes:
            self._send(pipe, ScrubOrder(tuple(blocks), first_slot))

    def close(self, timeout_s: float = 1.0) -> None:
        """End the ranks; the engine thread is gone, or stuck."""
        self._closing = True
        if self._meeting is not None:
            self._meeting.close()
        for pipe in self._pipes:
            try:
                pipe.send(StopOrder())
            except OSError:
                log.debug("a rank is gone already")
        deadline_s = time.monotonic() + timeout_s
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    # Inside.

    def _start(self, threads: int) -> None:
        ours, theirs = Pipe()
        kv, their_kv = Pipe()
        environment = dict(os.environ)
        environment[PARENT_VARIABLE] = str(os.getpid())
        environment.setdefault("OMP_NUM_THREADS", str(threads))
        handles = (theirs.fileno(), their_kv.fileno())
        self._processes.append(
            subprocess.Popen(
                [sys.executable, "-m", "tasuki.worker.rank_process", *map(str, handles)],
                stdin=subprocess.DEVNULL,
                pass_fds=handles,
                env=environment,
            )
        )
        theirs.close()
        their_kv.close()
        self._pipes.append(ours)
        self.kv.append(kv)
        self._reports.append(queue.SimpleQueue())

    def _await(self, rank: int) -> None:
        assert self._meeting is not None
        self._pipes.append(self._meeting.await_connection("orders", rank))
        self.kv.append(self._meeting.await_connection("kv", rank))
        self._reports.append(queue.SimpleQueue())
        log.info("rank %d is here, on another host", rank)

    def _send(
        self, pipe: Connection, order: Order | RankPlan | PoolShape, slab: object = None
    ) -> None:
        try:
            pipe.send(order)
            if slab is not None:
                pipe.send_bytes(slab)  # type: ignore[arg-type]
        except OSError as error:
            rank = 1 + self._pipes.index(pipe)
            raise self.explain(RankError(f"rank {rank} is gone: {error}")) from error

    def _report(self, rank: int) -> Report:
        report = self._reports[rank - 1].get()
        if isinstance(report, RankError):
            self._reports[rank - 1].put(report)  # for whoever asks again
            raise report
        return report

    def _listen(self) -> None:
        open_pipes = dict(enumerate(self._pipes, 1))
        while open_pipes:
            for ready in wait(list(open_pipes.values())):
                rank = 1 + self._pipes.index(ready)  # type: ignore[arg-type]
                try:
                    report: Report = open_pipes[rank].recv()
                except (EOFError, OSError):
                    report = Failed(self._describe_end(rank))
                if not isinstance(report, Failed):
                    self._reports[rank - 1].put(report)
                    continue
                del open_pipes[rank]
                if not self._closing and self._failure is None:
                    self._fail(RankError(f"rank {rank}: {report.message}"))

    def _describe_end(self, rank: int) -> str:
        if rank > len(self._processes):
            return "it has ended, or its host is lost"
        try:
            code = self._processes[rank - 1].wait(_LAST_WORDS_S)
        except subprocess.TimeoutExpired:
            return "it hung up"
        return f"it ended with exit status {code}" if code >= 0 else f"it ended by signal {-code}"

    def _fail(self, error: RankError) -> None:
        self._failure = error
        self._failed.set()
        for reports in self._reports:
            reports.put(error)
        self._on_failure(error)
