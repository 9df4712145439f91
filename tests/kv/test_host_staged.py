"""Handoffs through host memory for real: two processes, bytes compared, the far side killed.

Pools are plain memory here: the copies between pool and slots are the same calls as on a GPU.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator

import pytest
import torch
from kv_source_process import DEADLINE_S, Source, block_value, fill, layout, start_source

from tasuki.kv.effects import Pull, PullDone
from tasuki.kv.host_staged import HostStagedTransport
from tasuki.kv.puller import Connect, PeerFailed, Puller
from tasuki.kv.staging import SLOT_BYTES, parts_of
from tasuki.kv.transfer_plan import LayoutMismatchError, Region, Run, TransferPlan, make_plans

pytestmark = pytest.mark.system

SEED = 3
NUM_BLOCKS = 24
SIZES_KIB = (64, 3072)  # many blocks in a slot, and a block that fills one and a half


class Reader:
    """Our side: a pool, an agent, its two threads."""

    def __init__(self, block_kib: int) -> None:
        shape = layout(NUM_BLOCKS, block_kib)
        self.pool = shape.allocate()
        self.transport = HostStagedTransport()
        self.transport.register(self.pool, shape)
        self.reports: queue.Queue[PullDone | PeerFailed] = queue.Queue()
        self.puller = Puller(self.transport, self.reports.put)
        self.puller.start()
        self._orders = 0

    def connect(self, source: Source, name: str = "source") -> None:
        [pair] = make_plans([self.transport.layout], [source.pool.layout])
        digest = source.pool.transport_metadata_digest
        self.puller.put(Connect(name, source.pool.transport_metadata, digest, pair.plan))

    def order(self, pairs: list[tuple[int, int]], name: str = "source") -> None:
        self._orders += 1
        self.puller.put(Pull(self._orders, name, pairs))

    def ended(self) -> PullDone:
        report = self.reports.get(timeout=DEADLINE_S)
        assert isinstance(report, PullDone)
        return report


@pytest.fixture(scope="module", params=SIZES_KIB)
def reader(request: pytest.FixtureRequest) -> Iterator[tuple[Reader, int]]:
    reader = Reader(request.param)
    yield reader, request.param
    reader.puller.stop()


Start = Callable[..., Source]


@pytest.fixture
def start() -> Iterator[Start]:
    sources: list[Source] = []

    def begin(block_kib: int, tls: str = "") -> Source:
        sources.append(start_source(NUM_BLOCKS, block_kib, SEED, tls, "host-staged"))
        return sources[-1]

    yield begin
    for source in sources:
        source.stop()


@pytest.mark.parametrize("tls", ["", "tcp"], ids=["any", "tcp"])
def test_blocks_arrive_and_nothing_else_is_written(
    reader: tuple[Reader, int], start: Start, tls: str
) -> None:
    ours, block_kib = reader
    source = start(block_kib, tls)
    name = f"source {block_kib} {tls}"
    ours.connect(source, name)
    scattered = [((i * 7 + 5) % NUM_BLOCKS, i) for i in range(0, NUM_BLOCKS, 2)]
    adjacent = [(i, i + 3) for i in range(20)]
    for pairs in (scattered, adjacent):
        fill(ours.pool, 9)
        ours.order(pairs, name)
        done = ours.ended()
        assert not done.error
        assert done.moved_bytes == len(pairs) * block_kib * 1024
        written = {local: block_value(remote, SEED) for remote, local in pairs}
        for block in range(NUM_BLOCKS):
            wanted = written.get(block, block_value(block, 9))
            assert torch.equal(ours.pool[block], torch.full_like(ours.pool[block], wanted))


def test_a_source_killed_between_orders_is_an_error_and_another_serves_on(
    reader: tuple[Reader, int], start: Start
) -> None:
    ours, block_kib = reader
    first, second = start(block_kib), start(block_kib)
    ours.connect(first, f"first {block_kib}")
    ours.order([(0, 0)], f"first {block_kib}")
    assert not ours.ended().error
    first.kill()
    ours.order([(1, 1)], f"first {block_kib}")
    assert ours.ended().error
    ours.connect(second, f"second {block_kib}")
    ours.order([(2, 5)], f"second {block_kib}")
    assert not ours.ended().error
    assert (ours.pool[5] == block_value(2, SEED)).all()


def test_an_idle_source_leaves_the_processor_alone(start: Start) -> None:
    assert start(64).idle_cpu_fraction(4.0) < 0.15


def test_both_sides_must_stage(reader: tuple[Reader, int]) -> None:
    ours, _ = reader
    other = type(ours.transport.layout)()
    other.CopyFrom(ours.transport.layout)
    other.transport = "nixl/UCX"
    with pytest.raises(LayoutMismatchError, match="transport is host-staged/UCX here and nixl/UCX"):
        make_plans([ours.transport.layout], [other])


@pytest.mark.parametrize("slot_bytes", [100, 256, 1000, SLOT_BYTES])
@pytest.mark.parametrize("whole", [True, False])
def test_parts_fill_slots_and_cover_every_byte_once(whole: bool, slot_bytes: int) -> None:
    stride = 256 if whole else 512
    local, remote = Region(10_000, stride, 9, 0, "DRAM"), Region(50_000, stride, 9, 0, "DRAM")
    plan = TransferPlan(256, local, remote)
    runs = [Run(0, 3, 3), Run(7, 1, 1)] if whole else [Run(0, 3, 1), Run(1, 4, 1), Run(7, 1, 1)]
    moved = []
    parts = list(parts_of(runs, plan, slot_bytes))
    for part in parts:
        size = sum(segment.size_bytes for segment in part)
        assert size == slot_bytes or part is parts[-1]
        for each in part:
            moved += [(each.remote + i, each.local + i) for i in range(each.size_bytes)]
    pairs = [(r.remote + k, r.local + k) for r in runs for k in range(r.count)]
    wanted = [
        (50_000 + theirs * stride + i, 10_000 + own * stride + i)
        for theirs, own in pairs
        for i in range(256)
    ]
    assert moved == wanted
