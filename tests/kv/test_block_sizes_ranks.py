"""KV between engines of different block sizes, for real: a process a rank, every byte compared."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterator
from dataclasses import replace

import pytest
from rank_processes import (
    DEADLINE_S,
    DecodeEngine,
    PrefillEngines,
    Shape,
    check_units,
    decode_engines,
    units_of,
)
from support.transports import TRANSPORTS, skip_unless_there

pytestmark = pytest.mark.system

DEGREES = (1, 2, 4)
OURS = Shape(block_size=16, num_blocks=24)
SIZES = (32, pytest.param(8, marks=pytest.mark.long), 13)  # of the source
SOURCE_SEED, OWN_SEED = 3, 5
# So large that a piece is one block, and long enough over TCP for something to happen in it.
LARGE = Shape(head_kib=256, num_blocks=48, block_size=16)
LARGE_SOURCE = LARGE.with_blocks_of(12)


@pytest.fixture(scope="module", params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    skip_unless_there(request.param)
    return str(request.param)


@pytest.fixture(scope="module", params=SIZES)
def sources(
    request: pytest.FixtureRequest, transport: str
) -> Iterator[tuple[Shape, PrefillEngines]]:
    shape = replace(OURS, transport=transport).with_blocks_of(request.param)
    engines = PrefillEngines(shape, DEGREES, SOURCE_SEED)
    yield shape, engines
    engines.stop()


@pytest.fixture(scope="module")
def readers(transport: str) -> Iterator[dict[int, DecodeEngine]]:
    with decode_engines(replace(OURS, transport=transport), DEGREES, OWN_SEED) as engines:
        yield {engine.degree: engine for engine in engines}


@pytest.mark.parametrize(
    ("prefill", "decode"), list(itertools.product(DEGREES, DEGREES)), ids=lambda d: str(d)
)
def test_every_rank_gets_its_heads_of_the_tokens_and_nothing_else_is_written(
    sources: tuple[Shape, PrefillEngines],
    readers: dict[int, DecodeEngine],
    prefill: int,
    decode: int,
) -> None:
    shape, engines = sources
    reader, name = readers[decode], f"prefill of {prefill} {shape.block_size}"
    reader.ranked.connect(name, engines.pools[prefill])
    check_units(reader, name, (shape, OURS), SOURCE_SEED)
    reader.ranked.forget(name)


@pytest.fixture(params=TRANSPORTS)
def large(request: pytest.FixtureRequest) -> Iterator[tuple[PrefillEngines, DecodeEngine]]:
    """Two ranks on either side, TCP between them, connected as "e"."""
    skip_unless_there(request.param)
    source, own = (replace(shape, transport=request.param) for shape in (LARGE_SOURCE, LARGE))
    sources = PrefillEngines(source, (2,), SOURCE_SEED, tls="tcp")
    with decode_engines(own, (2,), OWN_SEED) as [reader]:
        reader.ranked.connect("e", sources.pools[2])
        yield sources, reader
    sources.stop()


def test_pieces_pass_through_staging_memory_in_turn(
    large: tuple[PrefillEngines, DecodeEngine],
) -> None:
    _, reader = large
    for seed in range(2):
        check_units(reader, "e", (LARGE_SOURCE, LARGE), SOURCE_SEED, seed)


def test_a_rank_that_dies_in_mid_pull_fails_the_order_and_no_later_one(
    large: tuple[PrefillEngines, DecodeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    sources, reader = large
    monkeypatch.setattr("tasuki.kv.host_staged._REPLY_S", 2.0)  # of the dead, in place of 10
    everything = units_of(LARGE_SOURCE, LARGE)
    reader.begin("e", everything[:4])
    assert not reader.end().error
    victim = sources.ranks[0]
    victim.send_signal(signal.SIGSTOP)  # so that none of the orders is over when it dies
    orders = [reader.begin("e", everything) for _ in range(4)]
    victim.send_signal(signal.SIGKILL)
    if reader._own.transport.name == "shm":  # reads what a stopped process has
        victim.process.join(DEADLINE_S)
        orders.append(reader.begin("e", everything))
    ends = [reader.end() for _ in orders]
    assert sorted(end.order_id for end in ends) == orders
    [last] = [end for end in ends if end.order_id == orders[-1]]  # ranks may end in another order
    assert last.error
    assert "cancelled" not in last.error, "the error that came first"
    shape = replace(LARGE_SOURCE, transport=reader._own.transport.name)
    successor = PrefillEngines(shape, (2,), SOURCE_SEED, tls="tcp")
    reader.ranked.forget("e")
    reader.ranked.connect("g", successor.pools[2])
    check_units(reader, "g", (LARGE_SOURCE, LARGE), SOURCE_SEED)
    successor.stop()


def test_a_cancelled_order_ends_and_the_next_one_is_whole(
    large: tuple[PrefillEngines, DecodeEngine],
) -> None:
    _, reader = large
    order_id = reader.begin("e", units_of(LARGE_SOURCE, LARGE))
    reader.ranked.cancel(order_id)
    assert reader.end().order_id == order_id
    check_units(reader, "e", (LARGE_SOURCE, LARGE), SOURCE_SEED, 2)
