"""`tasuki doctor` at real fleets: a healthy one, and the same with one worker that is slow.

`benchmarks/doctor.py` has all cases.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.deployment import Deployment
from support.fleet_cases import ALL, FleetCases, look

TWO_MIXED: FleetCases = next(fleet for fleet in ALL if fleet.name == "2 mixed")
CASES = {case.name: case for case in TWO_MIXED.cases}


@pytest.fixture(scope="module")
def two_mixed(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("doctor")
    deployment = Deployment.launch(TWO_MIXED.options(tiny_model, folder), folder)
    try:
        yield deployment
    finally:
        deployment.destroy()


@pytest.mark.parametrize("name", ["2 mixed, prompts that repeat", "one mixed worker slow"])
def test_what_is_wrong_is_found_and_nothing_else(two_mixed: Deployment, name: str) -> None:
    case = CASES[name]
    with case.act(two_mixed):
        seen = look(two_mixed, *case.arguments)
    assert {each["check"] for each in seen["findings"]} == ({case.finds} - {""}), seen["findings"]
    assert seen["exit_status"] == bool(case.finds)
    assert all(len(each["probes"]) >= 5 for each in seen["fleet"]["workers"]), seen["fleet"]
