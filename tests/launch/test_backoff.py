"""Delays between restarts."""

from __future__ import annotations

from tasuki.launch.backoff import Backoff, BackoffPolicy


def test_delays_double_up_to_the_cap_and_reset_after_a_long_run() -> None:
    backoff = Backoff(BackoffPolicy())
    assert [backoff.next_delay_s(1.0) for _ in range(7)] == [0.5, 1, 2, 4, 8, 10, 10]
    assert backoff.next_delay_s(60.0) == 0.5
    assert backoff.next_delay_s(59.9) == 1.0


def test_a_process_that_dies_for_days_does_not_overflow() -> None:
    backoff = Backoff(BackoffPolicy(), deaths=100_000)
    assert backoff.next_delay_s(0.0) == 10.0
