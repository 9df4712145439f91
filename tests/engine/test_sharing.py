"""One long prompt beside many short ones: steps in simulated time, no model, no torch."""

from __future__ import annotations

import random

import pytest
from test_scheduler import Bench

from tasuki.engine.api import Leg
from tasuki.engine.request import SequenceState, Stage
from tasuki.engine.sharing import Shares
from tasuki.engine.stats import StepSample

LONG, SHORT, COUNT = 100_000, 500, 50
TOKENS_PER_S, STEP_S, DECODE_S = 50_000.0, 1e-3, 6e-3


def test_a_long_prompt_leaves_half_to_short_ones():
    shares = Shares(100, [1_000, 900, 30, 30])
    for length, tokens in ((1_000, 50), (900, 0), (30, 30), (30, 20)):
        assert shares.offer(length) == tokens
        shares.take(length, tokens)


def test_a_prompt_that_waits_alone_or_with_its_like_takes_all():
    assert Shares(100, [1_000]).offer(1_000) == 100
    assert Shares(100, [1_000, 600]).offer(1_000) == 100


def test_what_short_prompts_do_not_need_is_for_the_long_one():
    shares = Shares(100, [1_000, 10])
    for length in (1_000, 10):
        shares.take(length, shares.offer(length))
    assert shares.offer(950) == 0
    shares.lift()
    assert shares.offer(950) == 40


def ttft_p99_s(long_first: bool, leg: Leg, decoding: int) -> float:
    """The slowest of 50 short prompts, by the steps that a scheduler plans."""
    bench = Bench(
        num_blocks=13_000,
        max_model_len=2 * LONG,
        block_size=32,
        max_batched_tokens=4_096,
        itl_target_s=0.015,
    )
    bench.rates.prefill_tokens_per_s = TOKENS_PER_S
    bench.rates.record(StepSample(1, DECODE_S, max(decoding, 1), 500 * decoding, 0, 0.0))
    for _ in range(decoding):
        bench.add(1)
    bench.step()
    if long_first:
        bench.add(LONG, leg)
    waiting = [bench.add(SHORT, leg) for _ in range(COUNT)]
    now_s, ended_s = 0.0, []
    while waiting:
        plan = bench.step()
        now_s += STEP_S + plan.prefill_tokens / TOKENS_PER_S + DECODE_S * bool(decoding)
        for sequence in [s for s in waiting if is_over(s)]:
            waiting.remove(sequence)
            bench.queues.remove(sequence)
            ended_s.append(now_s)
    return sorted(ended_s)[int(0.99 * COUNT)]


def is_over(sequence: SequenceState) -> bool:
    return sequence.stage is Stage.DECODE or len(sequence.tokens) > SHORT


@pytest.mark.parametrize(("leg", "decoding"), [(Leg.PREFILL, 0), (Leg.COLOCATED, 8)])
def test_fifty_short_prompts_beside_one_of_100k_tokens(leg: Leg, decoding: int):
    alone_s = ttft_p99_s(long_first=False, leg=leg, decoding=decoding)
    beside_s = ttft_p99_s(long_first=True, leg=leg, decoding=decoding)
    assert beside_s < 3.0 * alone_s
    assert beside_s > 1.5 * alone_s, "the long one gets its half"


@pytest.mark.parametrize("seed", range(30))
def test_a_step_wastes_nothing_while_prompts_wait(seed: int):
    choose = random.Random(seed)
    bench = Bench(num_blocks=4_000, max_model_len=4_000, max_batched_tokens=64)
    left = [bench.add(choose.choice((1, 9, 70, 1_500)), Leg.PREFILL) for _ in range(12)]
    while left:
        waiting = sum(len(s.tokens) - s.computed for s in left)
        plan = bench.step()
        assert plan.prefill_tokens == min(64, waiting)
        for sequence in [s for s in left if s.computed == len(s.tokens) - 1]:
            left.remove(sequence)
            bench.queues.remove(sequence)
