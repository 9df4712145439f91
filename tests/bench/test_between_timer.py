"""What lies between two steps, by the reports of a worker."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tasuki.bench.between_timer import Report, between_s, medians, period_s


def reports(count: int, pause_s: float, *, batch: int = 4, first: int = 1) -> list[Report]:
    """Steps of 10 ms, one after the other with a pause between them."""
    return [
        Report(
            at_s=number * (0.010 + pause_s),
            step=number,
            outputs=batch,
            sample=number,
            sequences=batch,
            duration_s=0.010,
        )
        for number in range(first, first + count)
    ]


def test_the_pause_is_what_steps_leave_of_the_time_between_reports() -> None:
    assert between_s(reports(20, 0.0007), 4) == pytest.approx(0.0007)
    assert between_s(reports(20, 0.0), 4) == pytest.approx(0.0, abs=1e-9)
    # A clock that reads late makes no time negative.
    assert between_s(reports(20, -0.001), 4) == 0.0


def test_only_steps_of_this_batch_that_follow_one_another_count() -> None:
    steady = reports(20, 0.001, first=6)
    joining = reports(5, 0.5, batch=3)
    assert between_s([*joining, *steady], 4) == pytest.approx(0.001)
    # A step between them was lost, and what came before it is too short.
    assert between_s([*reports(5, 0.5), *reports(20, 0.001, first=9)], 4) == pytest.approx(0.001)
    assert between_s(reports(6, 0.001), 4) is None
    assert between_s(reports(20, 0.001), 8) is None
    assert between_s([], 1) is None


def test_the_period_counts_reports_in_a_row_whatever_the_numbers_of_their_steps() -> None:
    # Where steps overlap, a launch and a collection are a turn each.
    apart = [replace(report, step=2 * report.step, sample=0) for report in reports(20, 0.001)]
    assert between_s(apart, 4) is None
    assert period_s(apart, 4) == pytest.approx(0.011)
    joining = [replace(report, outputs=3) for report in reports(5, 0.5)]
    assert period_s([*joining, *apart], 4) == pytest.approx(0.011)
    assert period_s(apart[:6], 4) is None
    assert period_s(apart, 8) is None


def test_the_median_is_of_the_loads_in_which_there_is_something() -> None:
    loads = {4: [reports(20, pause_s) for pause_s in (0.003, 0.001, 0.002)], 8: [reports(20, 0.0)]}
    loads[4].append(reports(3, 0.5))  # too short
    assert medians(loads, between_s) == {4: pytest.approx(0.002)}
    assert medians({}, between_s) == {}
