"""DECODE legs, and both together, through the engine's KvHost face."""

from __future__ import annotations

import time

import pytest
from engine_fakes import VOCAB, Rig, expected, make_rig, spec
from engine_relay import Relay

from tasuki.engine.api import (
    Assignment,
    FinishReason,
    FirstToken,
    Leg,
    LegEndReason,
    LegTimings,
    RequestSpec,
)
from tasuki.engine.errors import FailureKind, UnknownRequestError


def pulled(rig: Rig, request: RequestSpec, tokens: dict[int, int]) -> Assignment:
    """Run a DECODE leg's handoff: blocks filled as a transfer would."""
    source = make_rig()
    source.engine.submit(
        RequestSpec(
            request.request_id,
            Leg.PREFILL,
            request.prompt_tokens,
            request.sampling,
            request.resumed_tokens,
            request.choices,
        )
    )
    source.engine.admit(request.request_id)
    source.drain()
    announced = [b for r in source.results for a in r.announced for b in a.parts[0].blocks]
    assert rig.engine.may_credit(request.request_id)
    assignment = rig.engine.assign(request.request_id)
    assert assignment is not None
    [part] = assignment.parts
    for index in range(assignment.prefix_tokens // 4, len(announced)):
        rig.pool[part.blocks[index]].copy_(source.pool[announced[index]])
    first = [FirstToken(choice, token, False) for choice, token in tokens.items()]
    rig.engine.start_decode(request.request_id, first, LegTimings(transfer_s=1.5))
    return assignment


@pytest.mark.parametrize("prompt", [8, 11])
def test_decode_leg_goes_on_from_the_second_token(prompt: int):
    rig = make_rig()
    request = spec("a", range(prompt), leg=Leg.DECODE, choices=(0, 3), temperature=1.0)
    rig.engine.submit(request)
    assert not rig.engine.has_work()
    wanted = {choice: expected(request, choice, 64)[0] for choice in (0, 3)}
    pulled(rig, request, {choice: tokens[0] for choice, tokens in wanted.items()})
    rig.drain()
    for choice in (0, 3):
        assert rig.outputs["a", choice][0].position == 0
        assert rig.tokens("a", choice) == wanted[choice]
    counters = rig.engine.counters()
    assert (counters.prompt_tokens_computed, counters.output_tokens) == (0, 14)
    assert rig.ended["a"].reason is LegEndReason.FINISHED
    assert rig.ended["a"].timings.transfer_s == 1.5
    assert rig.ended["a"].timings.first_decode_s > 0


def test_the_load_has_the_kv_of_all_that_will_decode_here():
    """Once for each choice, from the submit until it decodes; a PREFILL leg's never.

    `awaited`: those whose prompts are computed elsewhere.
    """
    rig = make_rig(max_batched_tokens=16)

    def waiting(awaited: int = 0) -> tuple[int, int]:
        load = rig.engine.load()
        assert load.awaited_sequences == awaited
        return load.waiting_sequences, load.waiting_kv_tokens

    pull = spec("pull", range(8), leg=Leg.DECODE, choices=(0, 3), max_tokens=6)
    rig.engine.submit(pull)
    rig.engine.submit(spec("hand over", range(30), leg=Leg.PREFILL))
    assert waiting(awaited=2) == (2, 16)
    pulled(rig, pull, {choice: expected(pull, choice, 64)[0][0] for choice in (0, 3)})
    assert waiting() == (0, 0)
    assert (rig.engine.load().running_sequences, rig.engine.load().running_kv_tokens) == (2, 16)
    own = spec("own", [9] * 20, choices=(0, 1, 2))
    rig.engine.submit(own)
    assert waiting() == (3, 60)
    rig.engine.abort("own", (1,))
    assert waiting() == (2, 40)
    rig.engine.end_prefill_leg("hand over", LegEndReason.ABORTED)
    rig.step()
    assert waiting() == (2, 40), "a part of the prompt is computed"
    rig.drain()
    assert waiting() == (0, 0)


def test_first_decode_begins_when_the_request_may_be_scheduled():
    rig = make_rig()
    request = spec("a", range(4), leg=Leg.DECODE, max_tokens=2)
    rig.engine.submit(request)
    assert rig.engine.assign("a") is not None
    before_s = time.monotonic()
    rig.engine.start_decode("a", [FirstToken(0, 5, False)], LegTimings())
    rig.drain()
    assert 0.0 < rig.ended["a"].timings.first_decode_s <= time.monotonic() - before_s


def test_pulled_blocks_serve_the_next_request_here():
    rig = make_rig()
    request = spec("a", range(16), leg=Leg.DECODE, max_tokens=2)
    rig.engine.submit(request)
    pulled(rig, request, {0: expected(request, 0, 64)[0][0]})
    rig.drain()
    again = spec("b", [*range(16), 9], leg=Leg.DECODE, max_tokens=3)
    rig.engine.submit(again)
    assert pulled(rig, again, {0: expected(again, 0, 64)[0][0]}).prefix_tokens == 16
    rig.drain()
    assert rig.tokens("b") == expected(again, 0, 64)[0]


@pytest.mark.parametrize(("token", "finish"), [(5, FinishReason.STOP), (6, FinishReason.LENGTH)])
def test_first_token_that_finished_is_repeated_with_its_reason(token: int, finish: FinishReason):
    rig = make_rig()
    request = spec("a", range(9), leg=Leg.DECODE, stop_token_ids=frozenset({5}))
    rig.engine.submit(request)
    assert rig.engine.assign("a") is not None
    rig.engine.start_decode("a", [FirstToken(0, token, True)], LegTimings())
    rig.drain()
    assert (rig.tokens("a"), rig.finish("a")) == ([token], finish)
    assert rig.ended["a"].reason is LegEndReason.FINISHED


@pytest.mark.parametrize("tokens", [[VOCAB], [3, 3]], ids=["no token", "one choice twice"])
def test_first_tokens_that_no_model_draws_fail_the_request(tokens: list[int]):
    rig = make_rig()
    rig.engine.submit(spec("a", range(9), leg=Leg.DECODE))
    assert rig.engine.assign("a") is not None
    firsts = [FirstToken(0, token, False) for token in tokens]
    rig.engine.start_decode("a", firsts, LegTimings())
    rig.drain()
    assert rig.ended["a"].failure is FailureKind.TRANSPORT
    assert ("a", 0) not in rig.outputs


def test_ended_decode_leg_leaves_its_targets_quarantined():
    rig = make_rig()
    rig.engine.submit(spec("a", range(20), leg=Leg.DECODE))
    assignment = rig.engine.assign("a")
    assert assignment is not None
    busy = list(assignment.parts[0].blocks[2:4])
    rig.engine.end_decode_leg("a", LegEndReason.KV_LOST, "peer gone", quarantine=busy)
    rig.drain()
    assert rig.ended["a"].reason is LegEndReason.KV_LOST
    assert rig.engine.load().quarantined_blocks == 2
    assert rig.engine.load().free_blocks == 62
    rig.engine.check()
    rig.engine.free_quarantined(busy)
    rig.engine.check()
    assert rig.engine.load().free_blocks == 64


def test_what_was_pulled_and_not_accepted_leaves_nothing_behind():
    rig = make_rig()
    shared = list(range(8))  # two blocks
    rig.engine.submit(spec("first", [*shared, 9], max_tokens=2))
    rig.drain()
    rig.engine.submit(spec("a", [*shared, *range(20, 32)], leg=Leg.DECODE))
    assignment = rig.engine.assign("a")
    assert assignment is not None and assignment.prefix_tokens == 8
    blocks = list(assignment.parts[0].blocks)
    prefix, pulled = blocks[:2], blocks[2:]
    rig.pool[pulled] = float("nan")  # torn, or of a prefill worker that is broken
    kept, busy = rig.pool[prefix].clone(), pulled[-1:]
    rig.engine.end_decode_leg("a", LegEndReason.KV_LOST, quarantine=busy)
    assert rig.pool.isfinite().all(dim=(1, 2, 3, 4, 5)).logical_not().nonzero() == busy[0]
    rig.engine.free_quarantined(busy)
    assert rig.pool.isfinite().all()
    assert rig.pool[prefix].equal(kept), "the prefix is valid, and shared"
    rig.drain()
    rig.engine.submit(spec("again", [*shared, 9], leg=Leg.DECODE))
    assignment = rig.engine.assign("again")
    assert assignment is not None and assignment.prefix_tokens == 8


def test_a_lost_pull_leaves_blocks_that_others_hold_alone_after_a_flush():
    rig, alone = make_rig(), make_rig()
    own = spec("own", range(20), max_tokens=12)
    for each in (rig, alone):
        each.engine.submit(own)
        for _ in range(3):
            each.step()
    rig.engine.submit(spec("pull", range(20), leg=Leg.DECODE))
    assignment = rig.engine.assign("pull")
    assert assignment is not None and assignment.prefix_tokens >= 16
    shared = list(assignment.parts[0].blocks[: assignment.prefix_tokens // 4])
    before = rig.pool[shared].clone()
    assert before.count_nonzero()
    rig.engine.flush_cache()
    rig.engine.end_decode_leg("pull", LegEndReason.KV_LOST)
    assert rig.pool[shared].equal(before)
    rig.drain()
    alone.drain()
    assert rig.outputs["own", 0] == alone.outputs["own", 0]
    rig.engine.check()


def test_aborted_pull_ends_only_when_the_handoff_says_so():
    rig = make_rig()
    for name in ("a", "b"):
        rig.engine.submit(spec(name, range(20), leg=Leg.DECODE))
        assert rig.engine.assign(name) is not None
        rig.engine.abort(name)
    rig.drain()
    assert not rig.ended
    rig.engine.end_decode_leg("a", LegEndReason.ABORTED)
    rig.engine.start_decode("b", [FirstToken(0, 5, False)], LegTimings())
    rig.drain()
    assert rig.ended["a"].reason is rig.ended["b"].reason is LegEndReason.ABORTED
    assert rig.engine.referenced_blocks == 0


def test_abort_says_whether_anything_goes_on():
    rig = make_rig()
    for name, leg in (("p", Leg.PREFILL), ("d", Leg.DECODE)):
        rig.engine.submit(spec(name, range(20), leg=leg, choices=(0, 1)))
    rig.engine.admit("p")
    rig.step()
    assert rig.engine.assign("d") is not None
    for name in ("p", "d"):
        assert not rig.engine.abort(name, (1,))
        assert rig.engine.abort(name, (0, 1))
    assert not rig.engine.abort("never seen", (0,))


def test_credit_lets_own_work_have_what_it_does_not_take():
    rig = make_rig(num_blocks=32)  # two requests of 16 blocks
    rig.engine.submit(spec("held", range(40), leg=Leg.PREFILL))  # 10 blocks
    rig.engine.admit("held")
    rig.drain()
    rig.engine.submit(spec("lost", range(47, -1, -1), leg=Leg.DECODE))  # 12 blocks
    assignment = rig.engine.assign("lost")
    assert assignment is not None
    rig.engine.end_decode_leg("lost", LegEndReason.KV_LOST, quarantine=assignment.parts[0].blocks)
    own = spec("own", [*range(9), *range(31)], max_tokens=1)
    rig.engine.submit(spec("in", range(30), leg=Leg.DECODE, max_tokens=20))  # 13 blocks
    assert not rig.engine.may_credit("in")
    rig.engine.submit(own)
    rig.drain()
    rig.engine.free_quarantined(assignment.parts[0].blocks)
    rig.drain()
    assert "own" not in rig.ended, "what the denied pull may want is kept free"
    assert rig.engine.may_credit("in")
    rig.drain()
    assert rig.ended["own"].reason is LegEndReason.FINISHED


def test_credit_holds_room_back_until_the_leg_ends():
    rig = make_rig(num_blocks=32)  # two requests of 16 blocks
    for name in ("a", "b", "c"):
        rig.engine.submit(spec(name, range(48), leg=Leg.DECODE, max_tokens=16))
    assert rig.engine.may_credit("a")
    assert rig.engine.may_credit("a"), "credit is given once and stays"
    assert not rig.engine.may_credit("b"), "one maximal request is kept for own work"
    rig.engine.submit(spec("own", [*range(30), *range(30)]))
    rig.drain()
    assert rig.ended["own"].reason is LegEndReason.FINISHED
    rig.engine.end_decode_leg("a", LegEndReason.REFUSED)
    assert rig.engine.may_credit("b")


def test_waiting_own_work_and_denied_pulls_both_get_their_turn():
    rig = make_rig(num_blocks=32, max_batched_tokens=64)
    for index in range(6):
        prompt = [index, *range(40), *range(15)]
        rig.engine.submit(spec(f"own{index}", prompt, max_tokens=8))
        rig.engine.submit(spec(f"in{index}", prompt, leg=Leg.DECODE, max_tokens=8))
    credited = 0
    for _ in range(400):
        for index in range(6):
            name = f"in{index}"
            if name not in rig.ended and rig.engine.may_credit(name):
                assert rig.engine.assign(name) is not None, "a credit was not honoured"
                credited += 1
                rig.engine.end_decode_leg(name, LegEndReason.ABORTED)
        if rig.engine.has_work():
            rig.step()
    assert credited == 6
    assert all(rig.ended[f"own{i}"].reason is LegEndReason.FINISHED for i in range(6))


def test_youngest_pulled_request_goes_back_when_blocks_run_out():
    rig = make_rig(num_blocks=32)
    requests = [
        spec(f"d{i}", range(i, i + 20), leg=Leg.DECODE, max_tokens=40, seed=i) for i in range(4)
    ]
    for request in requests:
        rig.engine.submit(request)
        assert rig.engine.assign(request.request_id) is not None
        # The content does not matter here, only blocks.
        rig.engine.start_decode(request.request_id, [FirstToken(0, 1, False)], LegTimings())
    rig.drain()
    reasons = [rig.ended[r.request_id].reason for r in requests]
    assert reasons[0] is LegEndReason.FINISHED
    assert reasons[-1] is LegEndReason.RETURNED
    assert rig.engine.counters().prompt_tokens_computed == 0


def test_handoff_calls_for_unknown_legs():
    rig = make_rig()
    assert not rig.engine.may_credit("x")
    rig.engine.admit("x")
    rig.engine.end_prefill_leg("x", LegEndReason.ABORTED)
    rig.engine.end_decode_leg("x", LegEndReason.ABORTED)
    with pytest.raises(UnknownRequestError, match="x"):
        rig.engine.assign("x")
    with pytest.raises(UnknownRequestError, match="x"):
        rig.engine.start_decode("x", [], LegTimings())
    assert not rig.engine.has_work()


def test_split_request_equals_the_colocated_one():
    relay = Relay([make_rig(max_batched_tokens=5), make_rig()], seed=1)
    request = spec("a", range(30), choices=(0, 1), temperature=0.9, max_tokens=9)
    relay.submit(request, 0, 1)
    relay.drain()
    for choice in (0, 1):
        assert relay.tokens("a", choice) == expected(request, choice, 64)[0]
    assert relay.rigs[1].engine.counters().prompt_tokens_computed == 0
    assert all(token < VOCAB for token in relay.tokens("a", 0))
