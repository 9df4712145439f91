"""What a replay of the fleet's own log says of other ratios."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tasuki.doctor.advice import advice, best
from tasuki.doctor.result import DoctorError


def report(e2e: float, requests: float, off: float) -> dict[str, Any]:
    return {
        "change_percent": {"e2e_p95_ms": e2e, "requests_per_s": requests},
        "trust": {"median_percent": off},
    }


def test_the_best_ratio_is_told_with_what_the_replay_is_off() -> None:
    said = {"1:2": report(12.0, -3.0, 9.0), "2:1": report(-40.2, 18.0, 9.0)}
    assert best(said) == (
        "2:1 would give -40% end-to-end time (p95) and +18% requests per second, by a replay of"
        " your own log that is 9% off in the median"
    )


def test_a_gain_within_the_replays_own_error_is_no_advice() -> None:
    words = best({"2:1": report(-8.0, 1.0, 9.0)})
    assert words.startswith("no other ratio is surely better: 2:1 would give -8%")
    assert words.endswith("add workers")


def test_ratios_that_serve_nothing_in_the_replay_are_left_out() -> None:
    nothing: dict[str, Any] = {"change_percent": {}, "trust": {"median_percent": 9.0}}
    assert best({"1:2": nothing, "2:1": report(-40.0, 18.0, 9.0)}).startswith("2:1 would give")
    assert best({"1:2": nothing}).startswith("no other ratio serves the requests of your log")
    unknown = {"change_percent": {}, "trust": {"median_percent": None}}
    assert "add workers" in best({"1:2": unknown})


def test_a_ratio_that_fails_more_requests_is_left_out() -> None:
    refusing = report(-60.0, -48.0, 9.0)
    refusing["change_percent"]["failed_percent"] = 42.0
    good = report(-40.0, 18.0, 9.0)
    good["change_percent"]["failed_percent"] = 0.2
    assert best({"1:2": refusing, "2:1": good}).startswith("2:1 would give")
    assert best({"1:2": refusing}).startswith("no other ratio serves the requests of your log")


@pytest.mark.system
def test_what_is_no_log_is_named(tmp_path: Path) -> None:
    path = tmp_path / "requests.log"
    path.write_text("hello\n")
    with pytest.raises(DoctorError, match=r"requests\.log cannot be replayed: .*requests\.log"):
        advice(path, 1, 1)
