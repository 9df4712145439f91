"""KV between engines of different block sizes, for real: a process a rank, every byte compared."""

from __future__ import annotations

import itertools
import math
import random
import signal
from collections.abc import Iterator
from dataclasses import replace

import pytest
from rank_processes import DecodeEngine, PrefillEngines, Shape, decode_engines

pytestmark = pytest.mark.system

DEGREES = (1, 2, 4)
OURS = Shape(block_size=16, num_blocks=24)
SIZES = (32, 8, 13)  # of the source
SOURCE_SEED, OWN_SEED = 3, 5
# So large that a piece is one block, and long enough over TCP for something to happen in it.
LARGE = Shape(head_kib=256, num_blocks=48, block_size=16)
LARGE_SOURCE = replace(LARGE, block_size=12, num_blocks=64)


def units(source: Shape, reader: Shape, seed: int = 1) -> list[tuple[int, int]]:
    """(remote, local) units, as a sequence in scattered blocks has them, of most of both pools.

    They begin inside a remote block and end inside a local one.
    """
    choose = random.Random(seed)
    unit = math.gcd(source.block_size, reader.block_size)
    sides = []
    for shape in (source, reader):
        blocks = choose.sample(range(shape.num_blocks), shape.num_blocks)
        per = shape.block_size // unit
        sides.append([block * per + at for block in blocks for at in range(per)])
    theirs, ours = sides
    skipped = 1 if source.block_size > unit else 0
    count = min(len(theirs) - skipped, len(ours)) - reader.block_size // unit // 2
    return list(zip(theirs[skipped : skipped + count], ours[:count], strict=True))


def check_pull(reader: DecodeEngine, name: str, source: Shape, own: Shape, seed: int = 1) -> None:
    """Every rank has its heads of the tokens, and no other byte was written."""
    pairs = units(source, own, seed)
    reader.fill()
    reader.begin(name, pairs)
    done = reader.end()
    assert not done.error
    blocks = {remote * math.gcd(source.block_size, own.block_size) // source.block_size
              for remote, _ in pairs}  # fmt: skip
    assert done.moved_bytes >= len(blocks) * reader.rank_bytes * source.block_size // own.block_size
    assert (
        reader.differing_units({ours: theirs for theirs, ours in pairs}, source, SOURCE_SEED)
        == [[]] * reader.degree
    )


def source_of(own: Shape, size: int) -> Shape:
    return replace(own, block_size=size, num_blocks=own.num_blocks * own.block_size // size)


@pytest.fixture(scope="module", params=["nixl", "host-staged"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=SIZES)
def sources(
    request: pytest.FixtureRequest, transport: str
) -> Iterator[tuple[Shape, PrefillEngines]]:
    shape = source_of(replace(OURS, transport=transport), request.param)
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
    check_pull(reader, name, shape, OURS)
    reader.ranked.forget(name)


@pytest.fixture(params=["nixl", "host-staged"])
def large(request: pytest.FixtureRequest) -> Iterator[tuple[PrefillEngines, DecodeEngine]]:
    """Two ranks on either side, TCP between them, connected as "e"."""
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
        check_pull(reader, "e", LARGE_SOURCE, LARGE, seed)


def test_a_rank_that_dies_in_mid_pull_fails_the_order_and_no_later_one(
    large: tuple[PrefillEngines, DecodeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    sources, reader = large
    monkeypatch.setattr("tasuki.kv.host_staged._REPLY_S", 2.0)  # of the dead, in place of 10
    everything = units(LARGE_SOURCE, LARGE)
    reader.begin("e", everything[:4])
    assert not reader.end().error
    victim = sources.ranks[0]
    victim.send_signal(signal.SIGSTOP)  # so that none of the orders is over when it dies
    orders = [reader.begin("e", everything) for _ in range(4)]
    victim.send_signal(signal.SIGKILL)
    ends = [reader.end() for _ in orders]
    assert sorted(end.order_id for end in ends) == orders
    assert ends[-1].error
    assert "cancelled" not in ends[-1].error, "the error that came first"
    shape = replace(LARGE_SOURCE, transport=reader._own.transport.name)
    successor = PrefillEngines(shape, (2,), SOURCE_SEED, tls="tcp")
    reader.ranked.forget("e")
    reader.ranked.connect("g", successor.pools[2])
    check_pull(reader, "g", LARGE_SOURCE, LARGE)
    successor.stop()


def test_a_cancelled_order_ends_and_the_next_one_is_whole(
    large: tuple[PrefillEngines, DecodeEngine],
) -> None:
    _, reader = large
    order_id = reader.begin("e", units(LARGE_SOURCE, LARGE))
    reader.ranked.cancel(order_id)
    assert reader.end().order_id == order_id
    check_pull(reader, "e", LARGE_SOURCE, LARGE, 2)
