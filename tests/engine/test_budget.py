"""The two sides of the pool leave each other one request of maximal length."""

from __future__ import annotations

import pytest
from engine_fakes import make_rig, spec

from tasuki.engine.api import FirstToken, Leg, LegEndReason, LegTimings
from tasuki.engine.request import SequenceState


def credit_all(rig, names):
    return [name for name in names if rig.engine.may_credit(name)]


def test_prefill_legs_that_are_held_leave_room_for_pulls():
    rig = make_rig(num_blocks=40, max_batched_tokens=64)  # 16 blocks each at most
    for index in range(6):
        rig.engine.submit(spec(f"p{index}", [index] * 20, leg=Leg.PREFILL))
        rig.engine.admit(f"p{index}")
    rig.drain()
    assert rig.engine.referenced_blocks == 20  # four of 5 blocks; N - M is 24
    rig.engine.submit(spec("d", [9] * 63, leg=Leg.DECODE, max_tokens=1))
    assert credit_all(rig, ["d"]) == ["d"]
    assert rig.engine.assign("d") is not None


@pytest.mark.parametrize("num_blocks", [32, 40, 64, 100])
def test_legs_computed_ahead_leave_room_for_a_pull_and_for_a_leg_with_credit(num_blocks: int):
    rig = make_rig(num_blocks=num_blocks, max_batched_tokens=64)  # 16 blocks each at most
    for index in range(20):
        rig.engine.submit(spec(f"ahead{index}", [index] * 16, leg=Leg.PREFILL))
    rig.drain()
    ahead = rig.engine.referenced_blocks
    assert ahead == min(num_blocks - 32, num_blocks // 2) // 4 * 4
    names = [f"d{index}" for index in range(10)]
    for name in names:
        rig.engine.submit(spec(name, [9] * 63, leg=Leg.DECODE, max_tokens=1))
    credited = credit_all(rig, names)
    assert len(credited) == (num_blocks - 16 - ahead) // 16 > 0
    rig.engine.submit(spec("wanted", [8] * 63, leg=Leg.PREFILL))
    rig.engine.admit("wanted")
    rig.drain()
    assert ("wanted", 0) in rig.outputs


def test_credits_leave_room_for_own_prefills():
    rig = make_rig(num_blocks=40, max_batched_tokens=64)
    names = [f"d{index}" for index in range(6)]
    for name in names:
        rig.engine.submit(spec(name, [1] * 20, leg=Leg.DECODE, max_tokens=1))
    assert credit_all(rig, names) == names[:4]
    rig.engine.submit(spec("own", [2] * 63, max_tokens=1))
    rig.drain()
    assert "own" in rig.ended


def test_colocated_work_behind_a_held_back_prefill_leg_goes_on():
    rig = make_rig(num_blocks=40, max_batched_tokens=64)
    for index in range(5):
        rig.engine.submit(spec(f"p{index}", [index] * 20, leg=Leg.PREFILL))
        rig.engine.admit(f"p{index}")
    rig.engine.submit(spec("own", [2] * 20, max_tokens=1))
    rig.drain()
    assert "own" in rig.ended
    assert not rig.engine.has_work()


def test_credit_asks_for_room_to_grow():
    rig = make_rig(num_blocks=64, growth_headroom_tokens=8)
    names = [f"d{index}" for index in range(20)]
    for name in names:
        rig.engine.submit(spec(name, [1] * 8, leg=Leg.DECODE, choices=(0, 1), max_tokens=50))
    # 2 shared blocks and 2 more for each choice: 6 of the 48 that pulls may come to.
    assert len(credit_all(rig, names)) == 8


def test_credits_respect_the_running_limit():
    rig = make_rig(num_blocks=256, max_running_requests=5)
    names = [f"d{index}" for index in range(4)]
    for name in names:
        rig.engine.submit(spec(name, [1] * 8, leg=Leg.DECODE, choices=(0, 1)))
    assert len(credit_all(rig, names)) == 2


def test_colocated_requests_respect_the_running_limit():
    rig = make_rig(num_blocks=256, max_running_requests=5, max_batched_tokens=256)
    for index in range(4):
        rig.engine.submit(spec(f"r{index}", [index] * 8, choices=(0, 1)))
    rig.step()
    rig.step()
    assert rig.engine.load().running_requests == 2
    rig.drain()
    assert len(rig.ended) == 4


def test_a_request_of_several_choices_is_not_overtaken_by_single_ones():
    rig = make_rig(num_blocks=256, max_running_requests=2, max_batched_tokens=256)
    for name, choices in (("running", (0,)), ("pair", (0, 1)), ("single", (0,))):
        rig.engine.submit(spec(name, range(8), choices=choices))
    rig.drain()
    assert list(rig.ended) == ["running", "pair", "single"]


def pulls(rig, tokens, *names):
    """DECODE legs of so many tokens, each prompt another one."""
    for name in names:
        prompt = [ord(name[0]) % 48] * tokens
        rig.engine.submit(spec(name, prompt, leg=Leg.DECODE, max_tokens=1, tenant=name))


def start(rig, name, tokens):
    """A pulled request generates."""
    rig.engine.submit(spec(name, [7] * tokens, leg=Leg.DECODE, tenant=name))
    assert rig.engine.assign(name) is not None
    rig.engine.start_decode(name, [FirstToken(0, 1, False)], LegTimings())


def test_quarantined_blocks_count_as_pulled():
    rig = make_rig(num_blocks=64)  # pulls may come to 48
    pulls(rig, 63, "lost", "a", "b", "c")
    blocks = rig.engine.assign("lost").parts[0].blocks
    rig.engine.end_decode_leg("lost", LegEndReason.KV_LOST, quarantine=blocks)
    assert credit_all(rig, ["a", "b", "c"]) == ["a", "b"]
    rig.engine.free_quarantined(blocks)
    assert credit_all(rig, ["c"]) == ["c"]


@pytest.mark.parametrize(("waits", "credits"), [(True, ["a", "b"]), (False, ["a", "b", "c"])])
def test_credits_leave_own_work_that_waits_a_request_of_maximal_length(waits, credits):
    rig = make_rig(num_blocks=64)
    start(rig, "pulled", 59)  # 15 blocks, and one to grow into
    if waits:
        rig.engine.submit(spec("own", [2] * 20))
    pulls(rig, 63, "a", "b", "c")
    assert credit_all(rig, ["a", "b", "c"]) == credits


def test_what_is_promised_is_not_assigned_to_another():
    rig = make_rig(num_blocks=47)
    rig.engine.submit(spec("cached", range(40), max_tokens=1))
    rig.drain()  # its 10 blocks can be evicted
    start(rig, "p", 60)  # 15 blocks
    start(rig, "q", 60)
    pulls(rig, 24, "promised")  # 7 blocks, of 17
    assert credit_all(rig, ["promised"]) == ["promised"]
    rig.engine.submit(spec("same", range(41), leg=Leg.DECODE))  # 11 blocks, of which 10 are here
    pulls(rig, 44, "other")  # 11 blocks
    assert rig.engine.assign("same") is None
    assert rig.engine.assign("other") is None
    assert rig.engine.assign("promised") is not None


def test_pulls_that_are_assigned_leave_own_work_a_request_of_maximal_length():
    rig = make_rig(num_blocks=40)  # 16 blocks each at most
    pulls(rig, 63, "a", "b")
    assert rig.engine.assign("a") is not None
    assert rig.engine.assign("b") is None


def test_legs_that_wait_for_credit_do_not_count_all_that_are_held(monkeypatch: pytest.MonkeyPatch):
    def looks(waiting: int) -> int:
        rig = make_rig(num_blocks=400, max_batched_tokens=64)
        for index in range(50):
            rig.engine.submit(spec(f"held{index}", [index % 48, index // 48] * 8, leg=Leg.PREFILL))
        rig.drain()
        assert rig.engine.referenced_blocks == 200  # half of the pool: no more without credit
        for index in range(waiting):
            rig.engine.submit(spec(f"w{index}", [1] * 16, leg=Leg.PREFILL))
        asked: list[int] = []
        count = SequenceState.num_pages.fget

        def num_pages(sequence: SequenceState) -> int:
            asked.append(1)
            return count(sequence)

        with monkeypatch.context() as patch:
            patch.setattr(SequenceState, "num_pages", property(num_pages))
            rig.step()
        return len(asked)

    assert looks(100) == looks(1)
