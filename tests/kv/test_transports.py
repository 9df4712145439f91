"""What every transport does, for real: two processes, bytes compared, the far side killed.

Pools are plain memory here. Of the staged transport that is the same code as on a GPU: the
copies between pool and slots are the same calls.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import psutil
import pytest
import torch
from kv_source_process import (
    DEADLINE_S,
    Source,
    block_value,
    fill,
    layout,
    start_source,
)
from support.transports import TRANSPORTS, skip_unless_there
from support.waiting import idle_shares

from tasuki.kv.effects import Pull, PullDone, PullProgress
from tasuki.kv.puller import Connect, PeerFailed, Puller, PullerReport
from tasuki.kv.transfer_plan import make_plans
from tasuki.kv.transport import create_transport

pytestmark = pytest.mark.system

SEED, OWN_SEED = 3, 9
IDLE_SHARE = 0.15  # of a core; an agent that polls takes 0.9


@dataclass(frozen=True, slots=True)
class Case:
    """A transport and the shape of its pools; descriptors for two runs of adjacent blocks."""

    transport: str
    num_blocks: int
    block_kib: int
    descriptors: int

    def __str__(self) -> str:
        return f"{self.transport}-{self.block_kib}KiB"


CASES = (
    Case("host-staged", 24, 64, 2),  # many blocks in a slot
    Case("host-staged", 24, 3072, 20),  # a block fills one slot and a half
    *(Case(name, 64, 256, 2) for name in TRANSPORTS if name != "host-staged"),
)

Pairs = list[tuple[int, int]]


class Reader:
    """Our side: a pool, an agent and a transfer thread."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self._others = {thread.id for thread in psutil.Process().threads()}
        shape = layout(case.num_blocks, case.block_kib)
        self.transport = create_transport(case.transport)
        self.pool = self.transport.allocate(shape)
        self.transport.register(self.pool, shape)
        self.reports: queue.Queue[PullerReport] = queue.Queue()
        self.puller = Puller(self.transport, self.reports.put)
        self.puller.start()
        self._orders = 0

    def used_s(self) -> float:
        """Processor seconds of the threads that this process has since there is a reader."""
        own = (t for t in psutil.Process().threads() if t.id not in self._others)
        return sum(thread.user_time + thread.system_time for thread in own)

    def connect(self, source: Source, name: str) -> None:
        [pair] = make_plans([self.transport.layout], [source.pool.layout])
        digest = source.pool.transport_metadata_digest
        self.puller.put(Connect(name, source.pool.transport_metadata, digest, pair.plan))

    def order(self, pairs: Pairs, name: str) -> int:
        self._orders += 1
        self.puller.put(Pull(self._orders, name, pairs))
        return self._orders

    def report(self) -> PullDone | PeerFailed:
        """The next one; what takes more than a second reports its progress too."""
        while isinstance(report := self.reports.get(timeout=DEADLINE_S), PullProgress):
            continue
        return report

    def pull(self, pairs: Pairs, name: str) -> PullDone:
        order_id, done = self.order(pairs, name), self.report()
        assert isinstance(done, PullDone)
        assert done.order_id == order_id
        return done


@pytest.fixture(scope="module", params=CASES, ids=str)
def reader(request: pytest.FixtureRequest) -> Iterator[Reader]:
    skip_unless_there(request.param.transport)
    reader = Reader(request.param)
    yield reader
    reader.puller.stop()


Start = Callable[..., Source]


@pytest.fixture
def start(reader: Reader) -> Iterator[Start]:
    case, sources = reader.case, list[Source]()

    def begin(tls: str = "") -> Source:
        source = start_source(case.num_blocks, case.block_kib, SEED, tls, case.transport)
        sources.append(source)
        return source

    yield begin
    for source in sources:
        source.stop()


@pytest.mark.parametrize("tls", ["", "tcp"], ids=["any", "tcp"])
def test_blocks_arrive_and_nothing_else_is_written(reader: Reader, start: Start, tls: str) -> None:
    source, count = start(tls), reader.case.num_blocks
    reader.connect(source, f"source {tls}")
    scattered = [((i * 29 + 7) % count, i) for i in range(0, count, 2)]
    adjacent = [(i, i + 3) for i in range(count - 4)]
    for pairs, descriptors in ((scattered, len(scattered)), (adjacent, reader.case.descriptors)):
        fill(reader.pool, OWN_SEED)
        done = reader.pull(pairs, f"source {tls}")
        assert not done.error
        assert done.descriptors <= descriptors
        assert done.moved_bytes == len(pairs) * reader.case.block_kib * 1024
        written = {ours: block_value(remote, SEED) for remote, ours in pairs}
        for block in range(count):
            wanted = written.get(block, block_value(block, OWN_SEED))
            assert torch.equal(reader.pool[block], torch.full_like(reader.pool[block], wanted))
    assert source.stop() == 0


@pytest.mark.parametrize("tls", ["", "tcp"], ids=["any", "tcp"])
def test_a_source_killed_while_it_is_read_is_an_error_and_no_hang(
    reader: Reader, start: Start, tls: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, name, count = start(tls), f"victim {tls}", reader.case.num_blocks
    reader.connect(source, name)
    assert not reader.pull([(0, 0)], name).error
    everything = [((i * 29) % count, i) for i in range(count)]
    with monkeypatch.context() as patch:
        patch.setattr("tasuki.kv.host_staged._REPLY_S", 2.0)  # of the dead, in place of 10
        for _ in range(20):
            reader.order(everything, name)
        source.kill()  # most of them are not over; these cannot succeed:
        for _ in range(5):
            reader.order(everything, name)
        reports = [reader.report() for _ in range(25)]
    assert all(isinstance(report, PullDone) for report in reports)
    assert all(report.error for report in reports[-5:] if isinstance(report, PullDone))
    successor = start(tls)
    reader.connect(successor, f"{name} again")
    assert not reader.pull(everything, f"{name} again").error
    assert (reader.pool[1] == block_value(29 % count, SEED)).all()


def test_corrupt_metadata_is_refused_and_harms_nothing(reader: Reader, start: Start) -> None:
    source = start()
    whole = source.pool.transport_metadata
    source.pool.transport_metadata = whole[:40] + b"garbled!" + whole[48:]
    reader.connect(source, "corrupt")
    report = reader.report()
    assert isinstance(report, PeerFailed)
    assert "corrupted on the way" in report.message
    source.pool.transport_metadata = whole
    reader.connect(source, "whole")
    assert not reader.pull([(5, 5)], "whole").error


def test_idle_agents_leave_the_processor_alone(reader: Reader, start: Start) -> None:
    source = start()
    reader.connect(source, "idle")
    assert not reader.pull([(1, 1)], "idle").error

    theirs = psutil.Process(source.process.pid)
    idle_shares(
        lambda: {"reader": reader.used_s(), "source": sum(theirs.cpu_times()[:2])}, IDLE_SHARE
    )
