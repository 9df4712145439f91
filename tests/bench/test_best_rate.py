"""The planner's proof finds the best rate of a fleet with few runs."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
Seen = dict[str, float]
Climb = Callable[[Callable[[int], Seen | None], int], int]


@pytest.fixture
def climb(monkeypatch: pytest.MonkeyPatch) -> Climb:
    monkeypatch.syspath_prepend(CHECKOUT / "benchmarks")
    found: Climb = importlib.import_module("best_rate").climb
    return found


class Fleet:
    """Serves up to a number of rates in time, and of higher ones ever fewer requests."""

    def __init__(self, most: int, fall: float, runs: int = 100) -> None:
        self.most, self.fall, self.runs = most, fall, runs
        self.asked: list[int] = []

    def at(self, number: int) -> Seen | None:
        if len(self.asked) == self.runs:
            return None
        self.asked.append(number)
        attainment = (
            1.0 if number <= self.most else max(0.0, 1.0 - self.fall * (number - self.most))
        )
        return {"goodput": 1.12**number * attainment, "attainment": attainment}


@pytest.mark.parametrize("start", [-9, -1, 0, 1, 3, 12])
@pytest.mark.parametrize("fall", [0.3, 1.0])
def test_the_best_rate_is_found_from_anywhere(climb: Climb, start: int, fall: float) -> None:
    fleet = Fleet(most=2, fall=fall)
    assert climb(fleet.at, start) == 2
    assert len(fleet.asked) == len(set(fleet.asked)), "a rate was measured twice"
    assert len(fleet.asked) <= 4 + abs(start - 2)


def test_a_rate_far_too_high_is_left_in_leaps(climb: Climb) -> None:
    fleet = Fleet(most=0, fall=1.0)
    assert climb(fleet.at, 20) == 0
    assert len(fleet.asked) <= 8


def test_more_load_may_still_bring_more(climb: Climb) -> None:
    """A tenth too late at each further rate is less than the rate gains."""
    assert climb(Fleet(most=0, fall=0.02).at, 0) > 0


def test_fewer_requests_than_the_rate_says_are_no_fall(climb: Climb) -> None:
    """A short run's arrivals differ from its rate; what shows an overload is who is late."""
    fleet = Fleet(most=4, fall=1.0)

    def at(number: int) -> Seen | None:
        seen = fleet.at(number)
        assert seen is not None
        return seen | {"goodput": seen["goodput"] * (0.8 if number == 2 else 1.0)}

    assert climb(at, 1) == 4


def test_a_fleet_that_is_never_overloaded_ends_the_search(climb: Climb) -> None:
    fleet = Fleet(most=1_000, fall=1.0)
    climb(fleet.at, 0)
    assert len(fleet.asked) < 50


def test_what_was_seen_counts_where_the_time_is_over(climb: Climb) -> None:
    assert climb(Fleet(most=5, fall=1.0, runs=3).at, 0) == 2
    assert climb(Fleet(most=5, fall=1.0, runs=0).at, 4) == 4


def test_a_fleet_that_serves_nothing_ends_the_search(climb: Climb) -> None:
    fleet = Fleet(most=-1_000, fall=1.0)
    climb(fleet.at, 0)
    assert len(fleet.asked) < 20
