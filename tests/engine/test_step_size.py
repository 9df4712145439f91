"""The tokens of a step by the time that it may take, and which prompts get them.

Rates and time are simulated: no model, no torch.
"""

from __future__ import annotations

import random

import pytest
from test_scheduler import Bench

from tasuki.engine.api import Leg
from tasuki.engine.config import EngineConfig
from tasuki.engine.errors import EngineConfigError
from tasuki.engine.request import SequenceState, Stage
from tasuki.engine.stats import StepRates, StepSample
from tasuki.engine.step_size import Shares, step_tokens

TARGET_S = 0.1
LONG, SHORT, COUNT = 100_000, 500, 50
TOKENS_PER_S, STEP_S, DECODE_S = 50_000.0, 1e-3, 6e-3


def config(**settings: float | None) -> EngineConfig:
    values = {"num_blocks": 20_000, "max_model_len": 100_000, "vocab_size": 99}
    bounds = {"max_batched_tokens": 2_048, "itl_target_s": TARGET_S}
    return EngineConfig(**(values | bounds | settings))  # type: ignore[arg-type]


def record(measured: StepRates, prompt_tokens: int, decodes: int, duration_s: float) -> None:
    measured.record(StepSample(1, duration_s, decodes, 1_000 * decodes, prompt_tokens, 0.0))


def rates(tokens_per_s: float, decode_step_s: float = 0.0, decodes: int = 3) -> StepRates:
    measured = StepRates(prefill_tokens_per_s=tokens_per_s)
    if decode_step_s:
        record(measured, 0, decodes, decode_step_s)
    return measured


def tokens(sizes: EngineConfig, measured: StepRates, decodes: int, backlog: int) -> int:
    return step_tokens(sizes, measured, decodes, 1_000 * decodes, backlog)


def test_a_chunk_beside_decodes_fits_into_what_a_decode_step_leaves_of_the_target():
    assert tokens(config(), rates(900.0, 0.04), decodes=3, backlog=500) == 3 + 54
    assert tokens(config(), rates(90.0, 0.04), decodes=3, backlog=500) == 3 + 5


def test_steps_with_larger_chunks_fill_buckets():
    assert tokens(config(), rates(9_000.0, 0.04), decodes=3, backlog=500) == 512


def test_prompts_are_not_starved_where_decodes_alone_exceed_the_target():
    assert tokens(config(), rates(900.0, 0.12, 60), decodes=60, backlog=500) == 192  # 60 + 135


def test_a_queue_stretches_the_target_four_times_at_most():
    slow = rates(900.0, 0.04)
    assert tokens(config(), slow, decodes=3, backlog=96 * 60) == 3 + 60
    assert tokens(config(), slow, decodes=3, backlog=96 * 5_000) == 320  # 0.36 s: 3 + 324


def test_without_decodes_a_step_is_as_long_as_it_may_be():
    assert tokens(config(), rates(50.0), decodes=0, backlog=5_000) == 50
    assert tokens(config(longest_step_s=0.2), rates(50.0), decodes=0, backlog=9) == 10
    assert tokens(config(), rates(60_000.0), decodes=0, backlog=5_000) == 2_048
    assert tokens(config(), rates(100.0), decodes=0, backlog=5_000) == 64, "no longer than a second"


def test_beside_decodes_a_step_is_no_longer_either():
    bounds = config(itl_target_s=10.0, longest_step_s=0.2)
    assert tokens(bounds, rates(900.0, 0.04), decodes=3, backlog=500) == 192  # 3 + 180


def test_all_decodes_are_in_a_step_however_many():
    assert tokens(config(max_batched_tokens=32), rates(900.0, 0.04), decodes=60, backlog=9) == 60


def test_the_first_chunk_is_small_since_nothing_is_measured():
    assert tokens(config(), StepRates(), decodes=0, backlog=5_000) == 256
    assert tokens(config(), StepRates(), decodes=7, backlog=5_000) == 263
    assert tokens(config(max_batched_tokens=32), StepRates(), decodes=0, backlog=99) == 32


def test_without_a_target_tokens_alone_bound_a_step():
    slow = rates(1.0, 9.0)
    assert tokens(config(itl_target_s=None), slow, decodes=7, backlog=1) == 2_048
    assert tokens(config(itl_target_s=None), slow, decodes=3_000, backlog=1) == 3_000


def test_prompts_get_more_than_the_time_of_decodes_up_to_512_tokens():
    for tokens_per_s, expected in ((10_000.0, 320), (25_000.0, 512), (40_000.0, 704)):
        measured = rates(tokens_per_s, 0.02, 60)
        assert tokens(config(itl_target_s=0.02), measured, decodes=60, backlog=500) == expected


def test_prompts_get_four_fifths_of_the_time_of_decodes():
    """On an H200 50 decodes take 5.16 ms, with 462 tokens of prompts 8.72: results/gpu_steps."""
    measured = StepRates()
    for _ in range(30):
        record(measured, 0, 50, 5.16e-3)
        record(measured, 462, 50, 8.72e-3)
    gpu = config(itl_target_s=0.009)
    assert tokens(gpu, measured, decodes=50, backlog=1_000) == 576  # 50 + 4.1 ms
    assert tokens(config(itl_target_s=0.015), measured, decodes=50, backlog=1_000) == 1_344
    assert tokens(gpu, measured, decodes=50, backlog=150_000) in range(1_536, 2_049)


@pytest.mark.parametrize("fixed_s", [0.001, 0.03])
@pytest.mark.parametrize("tokens_per_s", [100.0, 3_000.0, 100_000.0])
def test_the_target_is_met_within_a_few_steps(tokens_per_s: float, fixed_s: float):
    """A device on which a chunk costs `fixed_s` and so much for each token."""
    measured, sizes = StepRates(), config(max_batched_tokens=1 << 20)
    decode_s = 0.02
    for _ in range(40):
        record(measured, 0, 4, decode_s)
        chunk = max(tokens(sizes, measured, decodes=4, backlog=1) - 4, 16)
        step_s = decode_s + fixed_s + chunk / tokens_per_s
        record(measured, chunk, 4, step_s)
    assert chunk == 16 or 0.5 * TARGET_S < step_s < 1.15 * TARGET_S


def test_a_small_chunk_hardly_moves_the_rate():
    measured = StepRates()
    for prompt_tokens, step_s in [(500, 0.07)] * 20 + [(20, 0.03)]:
        record(measured, 0, 4, 0.02)
        record(measured, prompt_tokens, 4, step_s)
    assert measured.mixed_tokens_per_s == pytest.approx(10_000, rel=0.05)


def test_times_must_be_positive():
    with pytest.raises(EngineConfigError, match="itl_target_s is 0"):
        config(itl_target_s=0.0)


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
