"""The tokens of a step from the time that it may take: simulated rates, no model, no torch."""

from __future__ import annotations

import pytest

from tasuki.engine.config import EngineConfig
from tasuki.engine.errors import EngineConfigError
from tasuki.engine.stats import StepRates, StepSample
from tasuki.engine.step_size import step_tokens

TARGET_S = 0.1


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
