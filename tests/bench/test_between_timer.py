"""What lies between two steps, by the reports of a worker."""

from __future__ import annotations

import pytest

from tasuki.bench.between_timer import Report, steps_served


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


def between_s(found: list[Report], batch: int) -> float | None:
    """The pause between two of these steps."""
    steps = steps_served(found, batch)
    return None if steps is None else steps.pause_s


def test_the_pause_is_what_steps_leave_of_the_time_between_reports() -> None:
    assert between_s(reports(20, 0.0007), 4) == pytest.approx(0.0007)
    assert between_s(reports(20, 0.0), 4) == pytest.approx(0.0, abs=1e-9)
    steps = steps_served(reports(20, 0.0007), 4)
    assert steps is not None and steps.period_s == pytest.approx(0.0107)
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
