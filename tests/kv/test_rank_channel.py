"""The pipe to another rank's transfer thread: what passes, and what the end of either side does."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import pytest
from handoff_rig import CopyTransport
from kv_source_process import fill, layout

import tasuki.kv.rank_channel
from tasuki.kv.clock import now_s
from tasuki.kv.effects import Pull, PullDone
from tasuki.kv.puller import Connect, PeerFailed
from tasuki.kv.rank_channel import KvRank, KvRankError, RemoteRanks
from tasuki.kv.transfer_plan import PairPlan, make_plans
from tasuki.kv.transport import rank_pool

DEADLINE_S = 60.0
LAYOUT = layout(num_blocks=8, block_kib=1)


@dataclass
class Bench:
    """Rank 1, here in a thread, and rank 0's end of its pipe."""

    transport: CopyTransport
    rank: KvRank
    theirs: Connection
    ranks: RemoteRanks
    reports: queue.Queue[PullDone | PeerFailed]


@pytest.fixture
def bench() -> Iterator[Bench]:
    ours, theirs = Pipe()
    transport = CopyTransport()
    transport.register(LAYOUT.allocate(), LAYOUT)
    reports: queue.Queue[PullDone | PeerFailed] = queue.Queue()
    rank = KvRank(transport, theirs)
    ranks = RemoteRanks([ours], reports.put)
    ranks.start()
    yield Bench(transport, rank, theirs, ranks, reports)
    rank._puller.stop()
    ranks.join(DEADLINE_S)
    ours.close()


def source() -> tuple[CopyTransport, PairPlan]:
    transport = CopyTransport()
    pool = LAYOUT.allocate()
    transport.register(pool, LAYOUT)
    fill(pool, 3)
    [plan] = make_plans([transport.layout], [transport.layout])
    return transport, plan


@pytest.mark.parametrize("shift_s", [-1000.0, 1000.0])
def test_times_of_a_rank_with_another_clock_are_told_by_ours(bench: Bench, shift_s: float) -> None:
    bench.rank._puller._clock = lambda: now_s() + shift_s
    [put] = bench.ranks.put
    far, plan = source()
    pool = rank_pool(far)
    put(Connect("p/1", pool.transport_metadata, pool.transport_metadata_digest, plan.plan))
    began_s = now_s()
    put(Pull(5, "p/1", [(6, 2), (7, 3)]))
    done = bench.reports.get(timeout=DEADLINE_S)
    assert isinstance(done, PullDone)
    assert began_s < done.finished_s <= now_s()
    assert 0.0 <= done.finished_s - done.posted_s < DEADLINE_S


def test_orders_go_there_and_their_ends_come_back(bench: Bench) -> None:
    assert bench.ranks.pools == [rank_pool(bench.transport)]
    [put] = bench.ranks.put
    far, plan = source()
    pool = rank_pool(far)
    put(Connect("p/1", pool.transport_metadata, pool.transport_metadata_digest, plan.plan))
    put(Pull(5, "p/1", [(6, 2), (7, 3)]))
    done = bench.reports.get(timeout=DEADLINE_S)
    assert isinstance(done, PullDone)
    assert (done.order_id, done.error, done.moved_bytes) == (5, "", 2 * LAYOUT.block_bytes)
    assert bench.transport.pool[2].eq(3006.0).all()
    assert bench.transport.pool[3].eq(3007.0).all()
    assert not bench.transport.pool[4].any()
    put(Connect("q/1", b"metadata", bytes(16), plan.plan))
    failed = bench.reports.get(timeout=DEADLINE_S)
    assert isinstance(failed, PeerFailed)
    assert failed.peer == "q/1"
    assert "corrupted" in failed.message


@pytest.mark.parametrize("closing", [False, True])
def test_rank_0_hears_that_a_transfer_thread_has_died(
    bench: Bench, caplog: pytest.LogCaptureFixture, closing: bool
) -> None:
    if closing:
        bench.ranks.close()
    bench.rank._puller.stop()
    bench.ranks.join(DEADLINE_S)
    assert not bench.ranks.is_alive()
    assert ("the KV side of rank 1 has ended" in caplog.text) is not closing


def test_rank_0_hears_that_a_rank_is_gone(bench: Bench) -> None:
    other, theirs = Pipe()
    theirs.send_bytes(rank_pool(bench.transport).SerializeToString())
    ranks = RemoteRanks([other], bench.reports.put)
    ranks.start()
    theirs.close()
    ranks.join(DEADLINE_S)
    assert not ranks.is_alive()
    with pytest.raises(KvRankError, match="rank 1 is gone"):
        ranks.put[0](Pull(1, "p/1", []))


def test_the_end_of_rank_0_ends_a_transfer_thread() -> None:
    ours, theirs = Pipe()
    transport = CopyTransport()
    transport.register(LAYOUT.allocate(), LAYOUT)
    rank = KvRank(transport, theirs)
    ours.close()
    rank._puller.join(DEADLINE_S)
    assert not rank._puller.is_alive()


def test_a_rank_that_does_not_start_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = Pipe()
    monkeypatch.setattr(tasuki.kv.rank_channel, "_START_S", 0.05)
    with pytest.raises(KvRankError, match=r"rank 1 did not tell of its KV pool in 0\.05 s"):
        RemoteRanks([ours], lambda _: None)
    theirs.close()
    with pytest.raises(KvRankError, match="rank 1 ended before"):
        RemoteRanks([ours], lambda _: None)
