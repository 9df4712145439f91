"""Times handoffs: blocks read from a pool of another process, by the real transport.

Blocks are scattered on both sides, as in a pool that has been in use for a
while. The other process owns a pool of the same layout, only smaller, since it
may share the GPU, and does nothing but let it be read. It ends with this one.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import queue
import random
from dataclasses import replace
from multiprocessing.connection import Connection

import torch

from tasuki.bench.errors import RunFailedError
from tasuki.bench.steps import StepPoint, TransferPoint
from tasuki.kv.effects import Pull, PullDone, PullProgress
from tasuki.kv.layout import CacheLayout
from tasuki.kv.puller import PeerFailed, Puller, PullerReport
from tasuki.kv.ranked import RankedPuller
from tasuki.kv.transport import Transport, create_transport, rank_pool
from tasuki.v1 import kv_pb2

_DEADLINE_S = 120.0
_PEER = "source"
_SCATTER = 2
"""The other process's pool has so many times the blocks of the largest handoff."""


def source_layout(layout: CacheLayout, most_blocks: int) -> CacheLayout:
    """Of the other process's pool: no larger than handoffs of so many scattered blocks need.

    Args:
        layout: Of the pool that reads.
        most_blocks: Of the largest handoff.
    """
    return replace(layout, num_blocks=min(_SCATTER * most_blocks, layout.num_blocks))


class TransferTimer:
    """Measures transfer points.

    Args:
        transport: Ours, registered; this object's alone from now on.
        layout: Of the registered pool.
        most_blocks: Of the largest handoff.
        device: Of the other process's pool.
        seed: Of the choice of blocks.
    """

    def __init__(
        self,
        transport: Transport,
        layout: CacheLayout,
        most_blocks: int,
        device: str,
        seed: int = 0,
    ) -> None:
        self._draw = random.Random(seed)
        self._layout = layout
        self._most = min(most_blocks, layout.num_blocks)
        self._source = source_layout(layout, most_blocks)
        self._orders = 0
        self._reports: queue.SimpleQueue[PullerReport] = queue.SimpleQueue()
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_be_read, args=(theirs, transport.name, self._source, device), daemon=True
        )
        self._process.start()
        theirs.close()
        source = self._from_source()
        self._puller = Puller(transport, self._reports.put)
        self._ranks = RankedPuller([transport.layout], [self._puller.put])
        self._puller.start()
        self._ranks.connect(_PEER, [source])

    def fits(self, point: StepPoint) -> bool:
        """Whether both pools have so many blocks."""
        return isinstance(point, TransferPoint) and point.blocks <= self._most

    def measure(self, point: StepPoint) -> float:
        """Seconds from posting the first block to the last one's arrival.

        Raises:
            RunFailedError: The transfer failed.
        """
        assert isinstance(point, TransferPoint)
        theirs = self._draw.sample(range(self._source.num_blocks), point.blocks)
        ours = self._draw.sample(range(self._layout.num_blocks), point.blocks)
        pairs = list(zip(theirs, ours, strict=True))
        self._orders += 1
        self._ranks.pull(Pull(self._orders, _PEER, pairs))
        try:
            while isinstance(part := self._reports.get(timeout=_DEADLINE_S), PullProgress):
                pass
        except queue.Empty:
            raise RunFailedError(
                f"{point.blocks} blocks were not there after {_DEADLINE_S:g} s"
            ) from None
        if isinstance(part, PeerFailed):
            raise RunFailedError(f"the other process cannot be read: {part.message}")
        assert isinstance(part, PullDone), "none was asked for"
        report = self._ranks.ended(part)
        assert report is not None, "there is one rank"
        if report.error or report.moved_bytes != point.blocks * self._layout.block_bytes:
            raise RunFailedError(
                f"a transfer of {point.blocks} blocks moved {report.moved_bytes} bytes: "
                f"{report.error or 'not all of them'}"
            )
        return report.finished_s - report.posted_s

    def close(self) -> None:
        """End the other process."""
        self._puller.stop()
        self._pipe.close()
        self._process.join(10.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _from_source(self) -> kv_pb2.RankPool:
        try:
            if self._pipe.poll(_DEADLINE_S):
                return kv_pb2.RankPool.FromString(self._pipe.recv_bytes())
        except EOFError:
            pass
        self._process.kill()
        raise RunFailedError("the process to read from did not start; its output says why")


def _be_read(pipe: Connection, transport_name: str, layout: CacheLayout, device: str) -> None:
    """The other process: own a pool until the pipe closes."""
    torch.set_num_threads(1)
    transport = create_transport(transport_name)
    pool = transport.allocate(layout, device)
    pool.fill_(1.0)
    transport.register(pool, layout)
    pipe.send_bytes(rank_pool(transport).SerializeToString())
    with contextlib.suppress(EOFError):
        pipe.recv()
