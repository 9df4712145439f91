"""Bounds of a share against known values and against simulation."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasuki.bench.intervals import count_above, effective_count, wilson


def test_wilson_gives_the_textbook_interval() -> None:
    low, high = wilson(0.8, 10, 0.025)  # 8 of 10, 95% two-sided
    assert low == pytest.approx(0.4902, abs=1e-4)
    assert high == pytest.approx(0.9433, abs=1e-4)


@given(
    st.integers(1, 2000).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))),
    st.floats(1e-4, 0.2),
)
def test_wilson_holds_the_share_and_stays_in_range(counts: tuple[int, int], error: float) -> None:
    count, met = counts
    low, high = wilson(met / count, count, error)
    assert 0.0 <= low <= met / count + 1e-12
    assert met / count - 1e-12 <= high <= 1.0


@given(st.floats(0.01, 0.999), st.floats(1e-4, 0.2))
def test_so_many_good_observations_show_a_share(share: float, error: float) -> None:
    count = count_above(share, error)
    assert wilson(1.0, 1.001 * count, error)[0] > share
    assert wilson(1.0, 0.999 * count, error)[0] < share


def test_no_observation_says_nothing() -> None:
    assert wilson(0.0, 0, 0.05) == (0.0, 1.0)


def test_wilson_covers_as_often_as_it_says() -> None:
    draw = random.Random(1)
    wrong = 0
    for _ in range(2000):
        share = sum(draw.random() < 0.9 for _ in range(200)) / 200
        wrong += wilson(share, 200, 0.05)[0] > 0.9
    assert wrong / 2000 < 0.07


def test_independent_outcomes_keep_about_their_count() -> None:
    draw = random.Random(2)
    counts = [effective_count([draw.random() < 0.9 for _ in range(500)]) for _ in range(200)]
    assert 300 < sum(counts) / len(counts) <= 500


def test_outcomes_that_come_in_bursts_count_for_less() -> None:
    burst = [index % 100 < 80 for index in range(500)]  # 20 late in a row, five times
    assert effective_count(burst) < 100


def test_too_few_outcomes_are_counted_as_they_are() -> None:
    assert effective_count([True] * 15) == 15
    assert effective_count([True, False] * 5) == 10
