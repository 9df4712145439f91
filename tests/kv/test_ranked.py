"""Orders over several ranks: which parts they have, and when they have ended."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tasuki.kv.effects import CancelPull, Pull, PullDone
from tasuki.kv.layout import CacheLayout
from tasuki.kv.puller import Connect, Forget, PullerCommand
from tasuki.kv.ranked import RankedPuller
from tasuki.kv.transfer_plan import LayoutMismatchError
from tasuki.v1 import kv_pb2

PAIRS = ((4, 1), (5, 2))
HEADS = 4


def pools(degree: int, name: str) -> list[kv_pb2.RankPool]:
    found = []
    for rank in range(degree):
        held = HEADS // degree
        shape = CacheLayout(8, held, 1, 4, 8, torch.float32, first_kv_head=rank * held)
        wire = shape.to_wire(shape.allocate(), transport="copy")
        metadata = f"{name} {rank}".encode()
        found.append(kv_pb2.RankPool(layout=wire, transport_metadata=metadata))
    return found


class Engine:
    """Our ranks; what their transfer threads are told is kept, in order."""

    def __init__(self, degree: int) -> None:
        self.told: list[list[PullerCommand]] = [[] for _ in range(degree)]
        layouts = [pool.layout for pool in pools(degree, "ours")]
        self.ranked = RankedPuller(layouts, [told.append for told in self.told])

    def take(self) -> list[list[PullerCommand]]:
        taken = [told.copy() for told in self.told]
        for told in self.told:
            told.clear()
        return taken

    def parts(self, order_id: int, peer: str = "e") -> list[tuple[int, str, int]]:
        """Give an order; its parts as (our rank, whom from, id)."""
        self.ranked.pull(Pull(order_id, peer, PAIRS))
        found = []
        for rank, commands in enumerate(self.take()):
            for command in commands:
                assert isinstance(command, Pull)
                assert command.pairs == PAIRS
                found.append((rank, command.peer, command.order_id))
        return found


def done(part: int, **said: float | str) -> PullDone:
    plain = PullDone(part, posted_s=2.0, finished_s=3.0, moved_bytes=10, descriptors=2)
    return replace(plain, **said)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("decode", "prefill", "wanted"),
    [
        (1, 1, [(0, "e/0")]),
        (2, 2, [(0, "e/0"), (1, "e/1")]),
        (2, 1, [(0, "e/0"), (1, "e/0")]),
        (1, 2, [(0, "e/0"), (0, "e/1")]),
        (2, 4, [(0, "e/0"), (0, "e/1"), (1, "e/2"), (1, "e/3")]),
    ],
)
def test_an_order_has_a_part_for_each_pair_of_ranks_and_ends_with_the_last(
    decode: int, prefill: int, wanted: list[tuple[int, str]]
) -> None:
    engine = Engine(decode)
    engine.ranked.connect("e", pools(prefill, "e"))
    connected = []
    for rank, commands in enumerate(engine.take()):
        for command in commands:
            assert isinstance(command, Connect)
            assert command.metadata == command.peer.replace("/", " ").encode()
            connected.append((rank, command.peer))
    assert connected == wanted
    first, second = engine.parts(7), engine.parts(8)
    assert [part[:2] for part in first] == [part[:2] for part in second] == wanted
    assert len({part for *_, part in first + second}) == 2 * len(wanted)
    for *_, part in first[:-1]:
        assert engine.ranked.ended(done(part)) is None
    count = len(wanted)
    last = done(first[-1][2], posted_s=1.0, finished_s=9.0)
    assert engine.ranked.ended(last) == PullDone(7, 1.0, 9.0, 10 * count, 2 * count)


def test_the_first_error_is_the_orders_and_ends_the_other_parts() -> None:
    engine = Engine(2)
    engine.ranked.connect("e", pools(4, "e"))
    engine.take()
    (_, _, a), (_, _, b), (_, _, c), (_, _, d) = engine.parts(7)
    assert engine.ranked.ended(done(b)) is None
    assert engine.ranked.ended(done(c, error="broke")) is None
    assert engine.take() == [[CancelPull(a)], [CancelPull(d)]]
    assert engine.ranked.ended(done(d, error="cancelled", moved_bytes=0)) is None
    assert engine.take() == [[], []], "they are told once"
    whole = engine.ranked.ended(done(a))
    assert whole is not None
    assert (whole.order_id, whole.error, whole.moved_bytes) == (7, "broke", 30)


def test_cancelling_reaches_the_parts_that_have_not_ended_and_no_other_order() -> None:
    engine = Engine(2)
    engine.ranked.connect("e", pools(2, "e"))
    engine.take()
    (_, _, a), (_, _, b) = engine.parts(7)
    engine.parts(8)
    assert engine.ranked.ended(done(a)) is None
    engine.ranked.cancel(7)
    assert engine.take() == [[], [CancelPull(b)]]
    whole = engine.ranked.ended(done(b, error="cancelled"))
    assert whole is not None
    assert (whole.order_id, whole.error) == (7, "cancelled")
    engine.ranked.cancel(7)
    assert engine.take() == [[], []]


def test_a_forgotten_engine_is_let_go_by_every_rank() -> None:
    engine = Engine(2)
    engine.ranked.connect("e", pools(1, "e"))
    engine.take()
    assert engine.ranked.engine_of("e/0") == "e"
    engine.ranked.forget("e")
    assert engine.take() == [[Forget("e/0")], [Forget("e/0")]]
    assert engine.ranked.engine_of("e/0") is None
    engine.ranked.forget("e")
    assert engine.take() == [[], []]


def test_an_engine_that_is_not_connected_is_left_to_our_transfer_thread_to_refuse() -> None:
    engine = Engine(2)
    [(rank, peer, part)] = engine.parts(7, "stranger")
    assert (rank, peer) == (0, "stranger")
    whole = engine.ranked.ended(done(part, error="stranger is not connected"))
    assert whole is not None
    assert (whole.order_id, whole.error) == (7, "stranger is not connected")


def test_pools_that_do_not_fit_are_refused_before_anyone_is_told() -> None:
    engine = Engine(2)
    with pytest.raises(LayoutMismatchError, match="held by no rank"):
        engine.ranked.connect("e", pools(2, "e")[1:])
    assert engine.take() == [[], []]
