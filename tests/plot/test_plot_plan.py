"""The picture of a plan: its front, and the design that was chosen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tasuki.plot.errors import ResultFileError
from tasuki.plot.figures.registry import figures
from tasuki.plot.load import Source, load
from tasuki.plot.options import Options


def probe(rate: float, ttft: float, tpot: float) -> dict[str, float]:
    seen = {
        "rate": rate,
        "goodput": rate,
        "attainment": 1.0,
        "ttft_p50_ms": 1.0,
        "tpot_p50_ms": 1.0,
    }
    return {**seen, "ttft_p95_ms": ttft, "tpot_p95_ms": tpot, "split": 0.5}


def design(name: str, *probes: dict[str, float]) -> dict[str, Any]:
    return {
        "name": name,
        "design": {"max_batched_tokens": 2048},
        "rate": probes[-1]["rate"],
        "probes": list(probes),
    }


def write_plan(path: Path, **changes: Any) -> Path:
    fast = design("2 mixed", probe(2.0, 100.0, 10.0), probe(8.0, 300.0, 30.0))
    slow = design("1 prefill + 1 decode", probe(2.0, 150.0, 9.0), probe(6.0, 5000.0, 11.0))
    data = {
        "schema": "tasuki.plan/1",
        "slo": {"ttft_s": 1.0, "tpot_s": 0.05},
        "steps": "steps by hand",
        "simulated": [fast, slow],
        "best": fast,
        "expected": probe(6.0, 220.0, 20.0),
    }
    path.write_text(json.dumps(data | changes))
    return path


def test_the_front_and_the_chosen_design_are_drawn(tmp_path: Path) -> None:
    results = load([Source(write_plan(tmp_path / "plan.json"))])
    (figure,) = figures(results, Options(), "plan")
    ttft, tpot = figure.panels
    curves = {curve.name: (curve.x, curve.y) for curve in ttft.curves}
    assert curves["Pareto front"] == ((100.0, 300.0), (2.0, 8.0))
    # 5 s is out of sight: five times the objective.
    assert curves["other designs"] == ((150.0,), (2.0,))
    assert curves["chosen: 2 mixed, step 2048"] == ((220.0,), (6.0,))
    curves = {curve.name: (curve.x, curve.y) for curve in tpot.curves}
    assert curves["Pareto front"] == ((9.0, 11.0, 30.0), (2.0, 6.0, 8.0))
    assert (ttft.guides[0].value, tpot.guides[0].value) == (1000.0, 50.0)


def test_where_no_design_meets_the_objectives_the_nearest_is_drawn(tmp_path: Path) -> None:
    far = design("2 mixed", probe(1.0, 4000.0, 100.0)) | {"rate": 0.0}
    farther = design("1 prefill + 1 decode", probe(1.0, 9000.0, 90.0)) | {"rate": 0.0}
    changes = {"simulated": [far, farther], "best": far, "expected": probe(1.0, 4100.0, 100.0)}
    (figure,) = figures(
        load([Source(write_plan(tmp_path / "p.json", **changes))]), Options(), "plan"
    )
    assert figure.title.endswith(": none meets the objectives, the nearest is 2 mixed, step 2048")
    curves = {curve.name: curve.x for curve in figure.panels[0].curves}
    assert curves == {
        "Pareto front": (4000.0,),
        "other designs": (9000.0,),
        "nearest: 2 mixed, step 2048": (4100.0,),
    }
    assert figure.panels[0].guides[0].value == 1000.0


def test_steps_of_prefill_workers_are_named_first(tmp_path: Path) -> None:
    own = design("1 prefill + 1 decode", probe(2.0, 150.0, 9.0))
    own["design"]["prefill_max_batched_tokens"] = 8192
    (plan,) = load([Source(write_plan(tmp_path / "plan.json", simulated=[own]))]).plans
    assert [known.name for known in plan.designs] == ["1 prefill + 1 decode, step 8192/2048"]


def test_other_versions_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ResultFileError, match=r"tasuki\.plan/9"):
        load([Source(write_plan(tmp_path / "plan.json", schema="tasuki.plan/9"))])
