"""How many requests the probes of a goodput search send."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tasuki.bench.goodput import SearchSettings
from tasuki.bench.goodput_run import search_goodput
from tasuki.bench.plan import Goal, Point


@pytest.mark.parametrize(
    ("options", "requests"),
    [({}, 200), ({"workload": "multi-turn"}, 800), ({"workload": "multi-turn", "turns": 3}, 600)],
)
def test_arrivals_last_as_long_with_conversations(options: dict[str, Any], requests: int) -> None:
    sent = []

    def run(given: Mapping[str, Any]) -> Mapping[str, Any]:
        sent.append(given["num-requests"])
        count = given["num-requests"]
        window = {"met": [True] * count, "due_s": [0.0] * count, "in_window": [True] * count}
        return {"requests": window, "metrics": {"goodput": 1.0}, "slo": {}, "workload": {}}

    search = SearchSettings(start_rate=10.0, min_probe_s=20.0, max_probes=2)
    target = cast(Any, SimpleNamespace(name="1m"))
    search_goodput(Point(target, "chat", Goal("ttft=1s", options, search)), run, lambda _: None)
    assert sent[0] == requests
