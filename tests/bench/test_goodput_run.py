"""How many requests the probes of a goodput search send; what is left of a search that fails."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tasuki.bench.errors import RunFailedError
from tasuki.bench.goodput import SearchSettings
from tasuki.bench.goodput_run import Found, search_goodput
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


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RunFailedError("out of memory"), "out of memory"),
        (OSError(28, "No space left on device"), "[Errno 28] No space left on device"),
        (KeyboardInterrupt(), "interrupted"),
    ],
)
def test_what_was_found_before_a_probe_failed_is_kept(error: BaseException, reason: str) -> None:
    kept: list[Found] = []

    def run(given: Mapping[str, Any]) -> Mapping[str, Any]:
        if given["request-rate"] > 3.0:
            raise error
        count = given["num-requests"]
        window = {"met": [True] * count, "due_s": [0.0] * count, "in_window": [True] * count}
        slo = {"ttft_s": 1.0}
        return {"requests": window, "metrics": {"goodput": 1.0}, "slo": slo, "workload": {}}

    target = cast(Any, SimpleNamespace(name="1m"))
    point = Point(target, "goodput", Goal("ttft=1s", {}, SearchSettings()))
    with pytest.raises(type(error)):
        search_goodput(point, run, lambda _: None, keep=kept.append)
    result = kept[0].result({"name": "1m"}, "m")
    assert (result["failed"], result["interval"]) == (reason, [2.0, None])
    assert [each["rate"] for each in result["points"]] == [1.0, 2.0]
