"""What the decode worker asks of prefill engines, and what an answer proves."""

from __future__ import annotations

import pytest

from tasuki.kv.config import HandoffConfig
from tasuki.kv.decode_handoff import NEVER_S, DecodeHandoff
from tasuki.kv.effects import Effect, ToPrefill
from tasuki.kv.prefill_peers import PrefillPeers
from tasuki.v1 import kv_pb2 as pb

LEASE_S = 10.0
CONFIG = HandoffConfig(lease_s=LEASE_S)


class Talk:
    """One prefill engine "p", connected at time 0."""

    def __init__(self) -> None:
        self.handoffs: dict[str, DecodeHandoff] = {}
        self.effects: list[Effect] = []
        self.peers = PrefillPeers(CONFIG, self.handoffs, self.effects)
        self.peers.connect("p", LEASE_S, 1, 0.0)

    def begin(self, now_s: float) -> DecodeHandoff:
        """A handoff "r" that is credited, and so wanted, at once."""
        greeted = self.peers.meet("p", "r")
        handoff = self.handoffs["r"] = DecodeHandoff("r", "p", now_s, greeted, credited_s=now_s)
        self.peers.want(handoff, now_s)
        return handoff

    def said(self) -> list[pb.FromDecode]:
        """What was said since the last call."""
        said = [effect.message for effect in self.effects if isinstance(effect, ToPrefill)]
        self.effects.clear()
        return said


def test_the_fence_counts_from_the_question() -> None:
    talk = Talk()
    handoff = talk.begin(1.0)
    seq = talk.said()[-1].want.seq
    assert talk.peers.fence_s(handoff) == NEVER_S
    talk.peers.answered(handoff, seq)
    assert talk.peers.fence_s(handoff) == 1.0 + LEASE_S * (1.0 - CONFIG.margin_fraction)


def test_an_old_answer_takes_nothing_back() -> None:
    talk = Talk()
    handoff = talk.begin(1.0)
    talk.peers.renew("p", [handoff], 4.0)
    want, renewal = talk.said()
    talk.peers.answered(handoff, renewal.renew.seq)
    talk.peers.answered(handoff, want.want.seq)
    assert handoff.acked_s == 4.0


def test_an_answer_proves_nothing_for_the_next_of_that_name() -> None:
    talk = Talk()
    first = talk.begin(1.0)
    seq = talk.said()[-1].want.seq
    second = talk.begin(2.0)
    talk.peers.answered(second, seq)
    assert second.acked_s == NEVER_S
    assert list(talk.peers.asked("p", seq)) == [first]


def test_questions_are_forgotten_when_no_answer_can_help() -> None:
    talk = Talk()
    handoff = talk.begin(1.0)
    seq = talk.said()[-1].want.seq
    talk.peers.renew("p", [handoff], 1.0 + 2 * LEASE_S)
    assert not talk.peers.asked("p", seq)


def test_numbers_are_never_used_twice() -> None:
    talk = Talk()
    talk.begin(1.0)
    seq = talk.said()[-1].want.seq
    talk.peers.forget("p")
    talk.peers.connect("p", LEASE_S, 1, 2.0)
    assert [m.want.seq for m in talk.said() if m.HasField("want")] == [seq + 1]


@pytest.mark.parametrize("keep", [False, True])
def test_a_release_is_repeated_until_it_is_answered(keep: bool) -> None:
    talk = Talk()
    handoff = talk.begin(1.0)
    del talk.handoffs["r"]
    talk.peers.release(handoff, 1.0, keep=keep)
    talk.said()
    talk.peers.tick(1.0 + LEASE_S)
    assert [(list(m.release.request_ids), m.release.keep) for m in talk.said()] == [(["r"], keep)]
    talk.peers.released("p", "r")
    assert not talk.peers.releasing
    assert not talk.peers.needs("p")


def test_a_release_is_not_repeated_for_ever() -> None:
    talk = Talk()
    handoff = talk.begin(1.0)
    del talk.handoffs["r"]
    talk.peers.release(handoff, 1.0, keep=False)
    talk.peers.tick(1.0 + 2 * LEASE_S)
    assert not talk.peers.releasing


def test_nothing_is_said_while_the_stream_is_down_and_all_of_it_after() -> None:
    talk = Talk()
    talk.peers.disconnect("p")
    talk.begin(1.0)
    talk.peers.release(DecodeHandoff("ended", "p", 0.0, greeted=True), 1.0, keep=False)
    assert not talk.said()
    talk.peers.connect("p", LEASE_S, 1, 2.0)
    said = [message.WhichOneof("message") for message in talk.said()]
    assert said == ["want", "renew", "release"]
