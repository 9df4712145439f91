"""Who is asked how often, and what that says of equal workers and of a slow one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from tasuki.doctor.checks.speed import slow_worker
from tasuki.doctor.http import NoAnswerError
from tasuki.doctor.picture import Fleet, Probe, Worker
from tasuki.doctor.probes import Plan, Timed, time_workers

PLAN = Plan(rounds=7)
UNLUCKY = range(1, 8)
"""The first rounds that count."""


def compared(*seconds: Callable[[int], float], plan: Plan = PLAN) -> Fleet:
    """Workers that take so long in each round, as `tasuki doctor` times them."""

    def timed(of: Callable[[int], float]) -> Timed:
        return lambda round_: Probe(round_, of(round_), of(round_) / 10)

    fleet = Fleet([Worker(f"worker {number}", "tasuki", "mixed") for number in range(len(seconds))])
    subjects = [(worker, timed(of)) for worker, of in zip(fleet.workers, seconds, strict=True)]
    time_workers(subjects, plan, lambda: bool(slow_worker(fleet).findings))
    return fleet


def rounds(fleet: Fleet) -> Sequence[list[int]]:
    return [[probe.round for probe in worker.probes] for worker in fleet.workers]


def test_equal_workers_are_asked_once_a_round() -> None:
    fleet = compared(lambda _: 0.1, lambda _: 0.1)
    assert rounds(fleet) == [list(range(1, 8))] * 2
    assert not slow_worker(fleet).findings


def test_one_that_loses_the_first_rounds_by_chance_is_not_called_slow() -> None:
    fleet = compared(lambda _: 0.1, lambda round_: 0.3 if round_ in UNLUCKY else 0.1)
    assert rounds(fleet) == [list(range(1, 22))] * 2
    assert not slow_worker(fleet).findings


def test_one_that_stays_slow_is_found() -> None:
    fleet = compared(lambda _: 0.1, lambda _: 0.3)
    (finding,) = slow_worker(fleet).findings
    assert finding.what == "worker 1 is 3.0 times as slow as its peers"
    assert "the slowest in 21 of 21 rounds" in finding.evidence[0]


def test_one_that_stops_answering_is_asked_no_more() -> None:
    def breaks(round_: int) -> float:
        if round_ == 3:
            raise NoAnswerError("gone")
        return 0.1

    fleet = compared(lambda _: 0.1, breaks)
    assert rounds(fleet) == [list(range(1, 8)), [1, 2]]
    assert fleet.workers[1].probe_error == "gone"


@pytest.mark.parametrize("slower", [1.0, 3.0])
def test_the_time_for_them_may_be_over_after_the_first_round(slower: float) -> None:
    fleet = compared(lambda _: 0.1, lambda _: 0.1 * slower, plan=Plan(rounds=7, budget_s=0.0))
    assert rounds(fleet) == [[], []]
