"""KV between engines of several ranks, for real: a process a rank, every byte compared."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace

import psutil
import pytest
from rank_processes import (
    DecodeEngine,
    PrefillEngines,
    RankProcess,
    Shape,
    check_pull,
    decode_engines,
)
from support.waiting import idle_shares

from tasuki.kv.rank_channel import KvRankError

pytestmark = pytest.mark.system

DEGREES = (1, 2, 4)
SHAPE = Shape()
# Long enough over TCP for something to happen in the middle.
LARGE = Shape(head_kib=256, num_blocks=96)
SOURCE_SEED, OWN_SEED = 3, 5
IDLE_SHARE = 0.15  # of a core; what polls takes 0.9
SCATTERED = tuple(((i * 7 + 3) % 24, i) for i in range(0, 24, 2))
ADJACENT = tuple((i, i + 9) for i in range(4, 13))


@pytest.fixture(scope="module", params=["nixl", "shm", "tcp"])
def shape(request: pytest.FixtureRequest) -> Shape:
    return replace(SHAPE, transport=request.param)


@pytest.fixture(scope="module")
def sources(shape: Shape) -> Iterator[PrefillEngines]:
    sources = PrefillEngines(shape, DEGREES, SOURCE_SEED)
    yield sources
    sources.stop()


@pytest.fixture(scope="module")
def readers(shape: Shape) -> Iterator[dict[int, DecodeEngine]]:
    with decode_engines(shape, DEGREES, OWN_SEED) as engines:
        yield {engine.degree: engine for engine in engines}


@pytest.mark.parametrize(
    ("prefill", "decode"), list(itertools.product(DEGREES, DEGREES)), ids=lambda d: str(d)
)
def test_every_rank_gets_its_heads_and_nothing_else_is_written(
    sources: PrefillEngines, readers: dict[int, DecodeEngine], prefill: int, decode: int
) -> None:
    reader, name = readers[decode], f"prefill of {prefill}"
    reader.ranked.connect(name, sources.pools[prefill])
    for pairs in (SCATTERED, ADJACENT):
        done = check_pull(reader, name, pairs, SOURCE_SEED)
        joined = pairs is ADJACENT and prefill == decode
        assert done.descriptors == max(prefill, decode) * (1 if joined else len(pairs))
    reader.ranked.forget(name)


@pytest.fixture
def large() -> Iterator[tuple[PrefillEngines, DecodeEngine]]:
    """Two ranks on either side, TCP between them, connected as "e"."""
    sources = PrefillEngines(LARGE, (2,), SOURCE_SEED, tls="tcp")
    with decode_engines(LARGE, (2,), OWN_SEED) as [reader]:
        reader.ranked.connect("e", sources.pools[2])
        reader.begin("e", [(0, 0)])
        assert not reader.end().error
        yield sources, reader
    sources.stop()


EVERYTHING = tuple(((i * 29) % LARGE.num_blocks, i) for i in range(LARGE.num_blocks))


def exit_code(reader: DecodeEngine) -> int | None:
    """Of the reading rank beside rank 0."""
    [rank] = reader._others
    rank.process.join(10.0)
    return rank.process.exitcode


def cpu_s(reader: DecodeEngine, ranks: Sequence[RankProcess]) -> dict[str, float]:
    """Of each rank's process, and of the thread here that hears them."""
    pids = [rank.process.pid for rank in ranks]
    used = {f"rank {pid}": sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids}
    [hearing] = [t for t in psutil.Process().threads() if t.id == reader._remote.native_id]
    return {**used, "hearing": hearing.user_time + hearing.system_time}


def test_idle_ranks_leave_the_processor_alone(large: tuple[PrefillEngines, DecodeEngine]) -> None:
    sources, reader = large
    ranks = [*sources.ranks, *reader._others]
    idle_shares(lambda: cpu_s(reader, ranks), IDLE_SHARE)


def test_an_order_waits_for_its_slowest_rank(large: tuple[PrefillEngines, DecodeEngine]) -> None:
    sources, reader = large
    slow = sources.ranks[1]
    slow.send_signal(signal.SIGSTOP)
    reader.begin("e", EVERYTHING)
    assert reader.part() is None, "one rank's part has ended, the other's has not"
    assert reader._reports.empty()
    slow.send_signal(signal.SIGCONT)
    done = reader.end()
    assert not done.error
    assert done.moved_bytes == len(EVERYTHING) * reader.rank_bytes
    assert reader.differing({local: remote for remote, local in EVERYTHING}, SOURCE_SEED) == [
        [],
        [],
    ]


def test_a_cancelled_order_ends_only_when_no_rank_is_written_any_more(
    large: tuple[PrefillEngines, DecodeEngine],
) -> None:
    sources, reader = large
    slow = sources.ranks[1]
    slow.send_signal(signal.SIGSTOP)
    order_id = reader.begin("e", EVERYTHING)
    assert reader.part() is None
    reader.ranked.cancel(order_id)
    after = reader.begin("f", [])  # is refused by rank 0 at once
    refused = reader.part()
    assert refused is not None
    assert refused.order_id == after
    assert reader._reports.empty()
    slow.send_signal(signal.SIGCONT)
    done = reader.end()
    assert (done.order_id, done.error) == (order_id, "cancelled")
    assert 0 < done.moved_bytes < len(EVERYTHING) * reader.rank_bytes
    reader.begin("e", EVERYTHING)
    assert not reader.end().error


def test_rank_0_hears_of_the_end_of_a_reading_rank(
    large: tuple[PrefillEngines, DecodeEngine],
) -> None:
    sources, reader = large
    sources.ranks[1].send_signal(signal.SIGSTOP)  # so that the order is not over before
    reader.begin("e", EVERYTHING)
    assert reader.part() is None
    reader._others[0].send_signal(signal.SIGABRT)
    with pytest.raises(KvRankError):
        reader.end()
    assert exit_code(reader) == -signal.SIGABRT
    sources.ranks[1].send_signal(signal.SIGCONT)


def test_a_rank_that_dies_in_mid_pull_fails_the_order_and_no_later_one(
    large: tuple[PrefillEngines, DecodeEngine],
) -> None:
    sources, reader = large
    victim = sources.ranks[1]
    victim.send_signal(signal.SIGSTOP)  # so that none of the orders is over when it dies
    orders = [reader.begin("e", EVERYTHING) for _ in range(8)]
    victim.send_signal(signal.SIGKILL)
    try:
        ends = [reader.end() for _ in orders]
    except KvRankError:
        assert exit_code(reader) == -signal.SIGABRT
        pytest.skip("UCX gave the reading rank up with its peer (ucs/sys/stubs.c): a worker ends")
    assert sorted(end.order_id for end in ends) == orders
    assert ends[-1].error
    assert "cancelled" not in ends[-1].error, "the error that came first"
    successor = PrefillEngines(LARGE, (2,), SOURCE_SEED, tls="tcp")
    reader.ranked.forget("e")
    reader.ranked.connect("g", successor.pools[2])
    reader.begin("g", EVERYTHING)
    assert not reader.end().error
    successor.stop()
