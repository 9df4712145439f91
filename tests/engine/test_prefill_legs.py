"""PREFILL legs, through the engine's KvHost face."""

from __future__ import annotations

import time

import pytest
from engine_fakes import expected, make_rig, spec

from tasuki.engine.api import (
    FinishReason,
    FirstToken,
    Leg,
    LegEndReason,
)


def test_prefill_leg_waits_for_credit_in_a_small_pool():
    rig = make_rig(num_blocks=32)  # two requests of 16 blocks
    rig.engine.submit(spec("a", range(10), leg=Leg.PREFILL))
    rig.drain()
    assert rig.engine.load().waiting_prefill_tokens == 10
    assert rig.engine.counters().prompt_tokens_computed == 0
    rig.engine.admit("a")
    rig.drain()
    assert rig.engine.counters().prompt_tokens_computed == 10


def test_prefill_legs_are_computed_ahead_of_credit_where_there_is_room():
    rig = make_rig(num_blocks=64)  # four requests of 16 blocks: half of the pool is free
    for index in range(5):
        rig.engine.submit(spec(f"p{index}", [index] * 40, leg=Leg.PREFILL, max_tokens=4))
    rig.drain()
    assert rig.engine.counters().prompt_tokens_computed == 3 * 40
    assert {name for name, _ in rig.outputs} == {"p0", "p1", "p2"}, "first tokens are out"
    rig.engine.admit("p4")
    rig.drain()
    assert ("p4", 0) in rig.outputs, "credit overtakes those who have none"
    rig.engine.end_prefill_leg("p0", LegEndReason.HANDED_OFF)
    rig.drain()
    assert ("p3", 0) not in rig.outputs, "half of the pool is not free any more"
    for index in range(5):
        rig.engine.abort(f"p{index}")
        rig.engine.end_prefill_leg(f"p{index}", LegEndReason.ABORTED)
    rig.drain()
    assert rig.engine.referenced_blocks == 0


def test_nothing_is_computed_ahead_while_pulls_are_denied():
    rig = make_rig(num_blocks=64)
    for index in range(4):
        rig.engine.submit(spec(f"d{index}", [index] * 60, leg=Leg.DECODE, max_tokens=4))
    assert [rig.engine.may_credit(f"d{index}") for index in range(4)] == [True, True, True, False]
    for index in range(3):
        rig.engine.end_decode_leg(f"d{index}", LegEndReason.ABORTED)
    rig.engine.submit(spec("p", range(10), leg=Leg.PREFILL))
    rig.drain()
    assert rig.engine.counters().prompt_tokens_computed == 0
    assert rig.engine.may_credit("d3")
    rig.drain()
    assert rig.engine.counters().prompt_tokens_computed == 10


def test_prefill_leg_is_told_of_before_its_first_chunk_is_launched(overlap: bool):
    rig = make_rig(max_batched_tokens=6)
    told: list[str] = []
    rig.engine.on_started = told.extend
    launch = rig.engine._runner.launch
    known: list[list[str]] = []

    def launch_and_look(plan, now_s):
        known.append(list(told))
        return launch(plan, now_s)

    rig.engine._runner.launch = launch_and_look
    rig.engine.submit(spec("a", range(15), leg=Leg.PREFILL))
    rig.engine.admit("a")
    rig.drain()
    assert known == [["a"]] * 3


def test_prefill_leg_announces_full_blocks_chunk_by_chunk(overlap: bool):
    rig = make_rig(max_batched_tokens=6)
    request = spec("a", range(15), leg=Leg.PREFILL)
    rig.engine.submit(request)
    rig.engine.admit("a")
    results = [rig.step() for _ in range(3 + overlap)]
    told = [[(a.first_token, a.end_token) for a in r.announced] for r in results]
    assert told == [*[[]] * overlap, [(0, 4)], [(4, 12)], [(12, 15)]]
    [prefilled] = results[-1].prefilled
    token = expected(request, 0, 64)[0][0]
    assert prefilled.tokens == 15
    assert prefilled.first_tokens == (FirstToken(0, token, False),)
    assert rig.tokens("a") == [token]
    assert not rig.engine.has_work()
    assert rig.engine.referenced_blocks == 4
    assert rig.engine.load().leased_blocks == 4
    rig.engine.end_prefill_leg("a", LegEndReason.HANDED_OFF)
    rig.drain()
    assert rig.ended["a"].reason is LegEndReason.HANDED_OFF
    assert rig.engine.referenced_blocks == 0


def test_first_token_of_a_prefill_leg_tells_queue_and_prefill():
    rig = make_rig()
    arrived_s = time.monotonic() - 5.0  # the worker had it long before the engine
    rig.engine.submit(spec("a", range(10), leg=Leg.PREFILL), arrived_s)
    rig.engine.admit("a")
    rig.drain()
    [output] = rig.outputs["a", 0]
    assert output.timings is not None
    assert 5.0 <= output.timings.queue_s <= time.monotonic() - arrived_s
    assert output.timings.prefill_s > 0.0
    rig.engine.submit(spec("b", range(10), max_tokens=2))
    rig.drain()
    assert all(output.timings is None for output in rig.outputs["b", 0])


def test_cached_blocks_are_announced_with_the_first_chunk():
    rig = make_rig(max_batched_tokens=4)
    rig.engine.submit(spec("warm", range(16)))
    rig.drain()
    rig.engine.submit(spec("a", range(24), leg=Leg.PREFILL))
    rig.engine.admit("a")
    while not (result := rig.step()).announced:
        pass
    [announced] = result.announced
    assert (announced.first_token, announced.end_token) == (0, 20)
    assert [len(part.blocks) for part in announced.parts] == [5]


def test_prefill_leg_whose_choices_all_finish_ends_by_itself():
    rig = make_rig()
    rig.engine.submit(spec("a", range(10), leg=Leg.PREFILL, max_tokens=1, choices=(0, 1)))
    rig.engine.admit("a")
    while not (result := rig.step()).prefilled:
        pass
    assert [f.finished for f in result.prefilled[0].first_tokens] == [True, True]
    assert rig.ended["a"].reason is LegEndReason.FINISHED
    assert rig.finish("a") is FinishReason.LENGTH
    assert rig.engine.referenced_blocks == 0


@pytest.mark.parametrize("steps", range(4))
def test_aborted_prefill_leg_keeps_announced_blocks_until_it_is_ended(steps: int, overlap: bool):
    rig = make_rig(max_batched_tokens=6)
    rig.engine.submit(spec("a", range(15), leg=Leg.PREFILL))
    rig.engine.admit("a")
    for _ in range(steps + overlap if steps else 0):
        rig.step()
    told = [a for result in rig.results for a in result.announced]
    computed = rig.engine.counters().prompt_tokens_computed
    rig.engine.abort("a")
    rig.drain()
    assert told == [a for result in rig.results for a in result.announced]
    assert ("a" in rig.ended) == (steps == 0)
    assert (rig.engine.referenced_blocks > 0) == (steps > 0)
    rig.engine.end_prefill_leg("a", LegEndReason.ABORTED, "released")
    rig.drain()
    assert rig.ended["a"].reason is LegEndReason.ABORTED
    assert rig.engine.counters().prompt_tokens_computed <= computed + 6 * overlap
    assert rig.engine.referenced_blocks == 0


def test_announced_blocks_survive_a_pool_under_pressure():
    rig = make_rig(num_blocks=32, max_model_len=64)
    rig.engine.submit(spec("held", range(40), leg=Leg.PREFILL))
    rig.engine.admit("held")
    for _ in range(3):
        rig.step()
    [blocks] = [a.parts[0].blocks for r in rig.results for a in r.announced[-1:]][-1:]
    before = rig.pool[list(blocks)].clone()
    requests = [spec(f"r{i}", range(i, i + 12), max_tokens=40, seed=i) for i in range(6)]
    for request in requests:
        rig.engine.submit(request)
    rig.drain()
    assert rig.engine.counters().preemptions > 0
    for request in requests:
        assert rig.tokens(request.request_id) == expected(request, 0, 64)[0]
    assert rig.pool[list(blocks)].equal(before)
