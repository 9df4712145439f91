"""Few events, against what the binomial distribution says of them."""

from __future__ import annotations

import math

import pytest

from tasuki.doctor.chance import is_above


def tail(count: int, of: int, share: float) -> float:
    """How probable so many events or more are."""
    below = (math.comb(of, n) * share**n * (1 - share) ** (of - n) for n in range(count))
    return 1 - sum(below)


@pytest.mark.parametrize("share", [0.01, 0.05])
def test_the_fewest_events_that_count_are_improbable(share: float) -> None:
    for of in range(1, 1000, 7):
        fewest = next(count for count in range(of + 2) if is_above(count, of, share))
        assert tail(fewest, of, share) < 0.07, (fewest, of)
        assert fewest == 1 or tail(fewest - 1, of, share) > 0.05, (fewest, of)


def test_nothing_of_nothing_is_not_above() -> None:
    assert not is_above(0, 0, 0.01)
    assert not is_above(0, 100, 0.01)
    assert is_above(1e6, 1e7, 0.05)
