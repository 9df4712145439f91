"""How long a sweep will take, as far as its options tell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tasuki.bench.estimate import START_S, estimate, load_s
from tasuki.bench.goodput import SearchSettings
from tasuki.bench.plan import Goal, Load
from tasuki.bench.sweep_file import read_sweep
from tasuki.bench.sweep_state import SweepState


@pytest.mark.parametrize(
    ("options", "seconds"),
    [
        ({"request-rate": 2, "num-requests": 60}, 35.0),
        ({"request-rate": 2}, 55.0),  # 100 requests by default
        ({"request-rate": "2", "num-requests": "60"}, 35.0),
        ({"request-rate": 2, "duration-s": 30}, 35.0),
        ({"request-rate": 2, "num-requests": 600, "duration-s": 30}, 35.0),
        ({"max-concurrency": 4, "duration-s": 30}, 35.0),
        # A rate is that of conversations, and each of them has several requests.
        ({"request-rate": 2, "num-requests": 240, "workload": "multi-turn"}, 35.0),
        ({"request-rate": 2, "num-requests": 180, "workload": "multi-turn", "turns": 3}, 35.0),
        ({"max-concurrency": 4}, None),
        ({"request-rate": "inf", "num-requests": 60}, None),
        ({"request-rate": "many"}, None),
        ({"request-rate": 0}, None),
    ],
)
def test_a_load_lasts_as_long_as_its_arrivals(
    options: dict[str, Any], seconds: float | None
) -> None:
    assert load_s(Load("x", options)) == seconds


def test_a_search_is_counted_with_all_its_probes() -> None:
    search = SearchSettings(start_rate=2.0, min_requests=100, max_probes=4)
    assert load_s(Goal("ttft=1s", {}, search)) == 4 * 55.0


def test_a_plan_counts_starts_and_what_is_unknown_until_it_was_measured_elsewhere(
    tmp_path: Path,
) -> None:
    loads = [
        {"name": "open", "arguments": {"request-rate": 1, "num-requests": 15}},
        {"name": "closed", "arguments": {"max-concurrency": 2}},
    ]
    plan = read_sweep(None, {"workers": 2, "loads": loads})
    state = SweepState(plan, tmp_path)
    before = estimate(plan, state)
    assert (before.seconds, before.unknown) == (2 * (START_S + 20.0), 2)
    assert str(before) == "80 s and 2 points that run as long as the server takes"
    for point in plan.points(plan.targets[0]):
        state.finish(point, took_s=30.0)
    after = estimate(plan, state)
    assert (after.seconds, after.unknown) == (START_S + 60.0, 0)
    assert str(after) == "about 80 s"
