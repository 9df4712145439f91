"""What the prefill worker answers to decode engines that it no longer, or does not yet, serve."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from tasuki.engine.api import Announced, FirstToken, GroupBlocks, LegEndReason, Prefilled
from tasuki.kv import prefill_handoff
from tasuki.kv.config import HandoffConfig, HandoffCounters
from tasuki.kv.effects import ToDecode
from tasuki.kv.prefill_handoff import EndedRequests
from tasuki.kv.prefill_side import PrefillSide
from tasuki.v1 import kv_pb2 as pb

CONFIG = HandoffConfig(lease_s=10.0)


def told(side: PrefillSide, engine: str) -> list[str]:
    """Kinds of messages to an engine since the last call."""
    effects = [e for e in side.drain() if isinstance(e, ToDecode) and e.peer == engine]
    return [str(effect.message.WhichOneof("message")) for effect in effects]


def test_an_earlier_target_is_told_at_once_that_it_gets_nothing() -> None:
    host = SimpleNamespace(admit=lambda request_id: None)
    side = PrefillSide(host, CONFIG, HandoffCounters())
    side.submit("r", "first", 0.0)
    side.retarget("r", "second", 1.0)
    want = pb.FromDecode(want=pb.Want(request_id="r", seq=1))
    side.on_message("first", want, 2.0)
    assert told(side, "first") == ["gone"]
    side.on_message("third", want, 2.0)  # its retarget may be on the way
    assert told(side, "third") == []
    side.retarget("r", "first", 3.0)
    side.on_message("first", want, 4.0)
    assert told(side, "first") == []


@pytest.mark.parametrize(("finished", "ends"), [((True, False), 1), ((True, True), 0)])
def test_a_leg_is_over_by_itself_when_every_choice_is(finished: Sequence[bool], ends: int) -> None:
    """Else its blocks wait for the release."""
    ended: list[tuple[object, ...]] = []
    host = SimpleNamespace(
        admit=lambda request_id: None, end_prefill_leg=lambda *told: ended.append(told)
    )
    side = PrefillSide(host, CONFIG, HandoffCounters())
    side.submit("r", "d", 0.0)
    side.on_message("d", pb.FromDecode(want=pb.Want(request_id="r", seq=1)), 0.0)
    announced = Announced("r", 0, 4, [GroupBlocks(0, 0, (1,))])
    firsts = tuple(FirstToken(choice, 5, over) for choice, over in enumerate(finished))
    side.on_step([announced], [Prefilled("r", 4, firsts)], 1.0)
    assert (side.leased_blocks, ended) == (ends, [])
    side.on_message("d", pb.FromDecode(release=pb.Release(request_ids=["r"])), 2.0)
    assert ended == [("r", LegEndReason.HANDED_OFF, "")] * ends
    assert side.idle


def test_a_lease_that_runs_out_is_counted_and_ends_the_leg() -> None:
    ended: list[tuple[object, ...]] = []
    host = SimpleNamespace(
        admit=lambda request_id: None, end_prefill_leg=lambda *told: ended.append(told)
    )
    counters = HandoffCounters()
    side = PrefillSide(host, CONFIG, counters)
    side.submit("r", "d", 0.0)
    side.on_message("d", pb.FromDecode(want=pb.Want(request_id="r", seq=1)), 0.0)
    side.on_step([Announced("r", 0, 4, [GroupBlocks(0, 0, (1,))])], [], 1.0)
    side.tick(10.9)
    assert (counters.leases_granted, counters.leases_expired, ended) == (1, 0, [])
    side.tick(11.0)
    assert (counters.leases_granted, counters.leases_expired) == (1, 1)
    [(name, reason, message)] = ended
    assert (name, reason) == ("r", LegEndReason.FAILED)
    assert "lease of 10 s ran out: d did not renew it" in str(message)


def test_a_want_is_refused_when_its_leg_ends_and_after_that() -> None:
    side = PrefillSide(SimpleNamespace(admit=lambda _: None), CONFIG, HandoffCounters())
    want = pb.FromDecode(want=pb.Want(request_id="r", seq=1))
    side.submit("r", "d", 0.0)
    side.on_message("d", want, 0.0)
    side.on_leg_ended("r", 1.0)
    assert told(side, "d") == ["gone"]
    side.on_message("d", want, 2.0)
    assert told(side, "d") == ["gone"]
    assert side.idle


def test_a_lease_begins_with_the_want_and_again_when_its_holder_gives_the_work_back() -> None:
    ended: list[tuple[object, ...]] = []
    host = SimpleNamespace(admit=lambda _: None, end_prefill_leg=lambda *told: ended.append(told))
    side = PrefillSide(host, CONFIG, HandoffCounters())
    side.submit("r", "d", 0.0)
    side.on_step([Announced("r", 0, 4, [GroupBlocks(0, 0, (1,))])], [], 1.0)
    assert (side.leased_blocks, side.next_deadline()) == (0, None), "computed ahead"
    side.on_message("d", pb.FromDecode(want=pb.Want(request_id="r", seq=1)), 2.0)
    assert (side.leased_blocks, side.next_deadline()) == (1, 12.0)
    release = pb.Release(request_ids=["r"], keep=True)
    side.on_message("d", pb.FromDecode(release=release), 5.0)
    assert (side.next_deadline(), ended) == (15.0, []), "the router may retarget it"


def test_few_names_of_ended_requests_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_handoff, "_MAX_ENDED", 3)
    ended = EndedRequests(keep_s=10.0)
    for index in range(5):
        ended.add(f"r{index}", float(index))
    ended.expire(4.0)
    assert [f"r{index}" in ended for index in range(5)] == [False, False, True, True, True]
    ended.expire(13.0)
    assert [f"r{index}" in ended for index in range(5)] == [False, False, False, False, True]
