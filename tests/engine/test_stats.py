"""What the engine expects of its next steps."""

from __future__ import annotations

import pytest

from tasuki.engine.stats import StepRates, StepSample


def record(
    rates: StepRates, prompt_tokens: int, decodes: int, duration_s: float, kv_tokens: int = 0
) -> None:
    rates.record(StepSample(1, duration_s, decodes, kv_tokens, prompt_tokens, 0.0))


def test_nothing_is_expected_of_what_was_never_measured():
    rates = StepRates()
    assert rates.expected_s(0, 5) == rates.expected_s(100, 0) == rates.expected_s(0, 0) == 0.0
    record(rates, 0, 5, 2.0)
    assert rates.expected_s(0, 9) == 2.0
    assert rates.expected_s(100, 9) == 0.0


def test_steps_with_prompts_are_expected_by_their_size():
    rates = StepRates()
    record(rates, 0, 8, 5e-3)
    record(rates, 500, 8, 9e-3)
    record(rates, 100, 8, 6e-3)
    record(rates, 500, 0, 7e-3)
    assert 0.8 * 9e-3 < rates.expected_s(510, 9) < 9e-3
    assert 0.8 * 6e-3 < rates.expected_s(64, 9) < 6e-3
    assert 0.8 * 7e-3 < rates.expected_s(450, 0) < 7e-3
    assert rates.expected_s(1000, 9) == 0.0
    assert rates.decode_step_s == 5e-3


def test_the_longest_launch_of_late_counts_for_its_kind():
    rates = StepRates()
    for duration_s in (1e-3, 4e-3, 1e-3):
        rates.record_launch(duration_s, prompts=False)
    rates.record_launch(12e-3, prompts=True)
    assert rates.launch_s(prompts=False) == pytest.approx(4e-3, rel=0.1)
    assert rates.launch_s(prompts=True) == 12e-3
    for _ in range(200):
        rates.record_launch(1e-3, prompts=False)
    assert rates.launch_s(prompts=False) == 1e-3


def test_the_lead_grows_when_the_device_waited_and_shrinks_slowly_else():
    rates = StepRates()
    first_s = rates.lead_s
    rates.record_lead(late=True)
    grown_s = rates.lead_s
    assert grown_s > first_s
    for _ in range(20):
        rates.record_lead(late=False)
    assert first_s < rates.lead_s < grown_s
    for _ in range(1000):
        rates.record_lead(late=True)
    most_s = rates.lead_s
    for _ in range(5000):
        rates.record_lead(late=False)
    assert most_s <= 5e-3
    assert 0.0 < rates.lead_s < first_s


def test_a_step_is_hung_after_the_timeout_or_far_beyond_what_was_measured():
    rates = StepRates()
    assert rates.limit_s(100, 0, 30.0, compiled=False) == 300.0  # the first may compile kernels
    assert rates.limit_s(100, 0, 30.0, compiled=True) == 30.0
    record(rates, 100, 0, 1e-3)
    assert rates.limit_s(100, 0, 30.0, compiled=False) == 30.0
    record(rates, 0, 8, 2.0)
    assert rates.limit_s(0, 8, 30.0, compiled=True) == 100.0
    rates = StepRates()
    record(rates, 100, 0, 1.0)  # another size, at the same rate
    assert rates.limit_s(1000, 0, 30.0, compiled=False) == pytest.approx(500.0)


def test_the_decodes_part_is_known_where_every_step_has_prompts():
    """A device that needs 2 ms a step, 10 us a decode, 30 ns a KV token, 11 us a prompt token."""
    rates = StepRates()
    record(rates, 2048, 0, 0.028)
    for number in range(300):
        decodes = min(1 + number // 8, 24)
        prompt_tokens, kv_tokens = 200 + 64 * (number % 5), 5_100 * decodes
        duration_s = 2e-3 + 1e-5 * decodes + 3e-8 * kv_tokens + 1.1e-5 * prompt_tokens
        record(rates, prompt_tokens, decodes, duration_s, kv_tokens)
    assert rates.decode_step_s == 0.0, "no step only decoded"
    decode_s = 2e-3 + 1e-5 * 24 + 3e-8 * 122_400
    assert rates.decode_s(24, 122_400) == pytest.approx(decode_s, rel=0.05)
    assert 1.0 / rates.mixed_tokens_per_s == pytest.approx(1.1e-5, rel=0.05)
