"""A thread or a task of a worker that dies of a defect ends the worker, which says why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.crowd import Crowd
from support.deployment import Deployment, Options
from support.faulty_worker import FAULT_LINE
from support.reference import Reference
from support.waiting import until

pytestmark = pytest.mark.faults


@pytest.mark.parametrize(
    ("fault", "line"),
    [
        ("transfer-thread", "thread kv-transfer failed"),
        ("stream-task", "task kv stream to"),
    ],
)
def test_a_part_that_dies_ends_its_worker(
    fault: str,
    line: str,
    tiny_model: Path,
    deploy: Callable[[Options], Deployment],
    short_ones: list[Reference],
    tmp_path: Path,
) -> None:
    switch = tmp_path / "switch"
    module = ("support.faulty_worker", fault, str(switch))
    worker = ("--kv-memory", "50000000", "--lease-s", "5")
    system = deploy(
        Options(tiny_model, prefill=1, decode=1, worker=worker, modules={"decode-0": module})
    )
    process = system.workers["decode-0"].process
    switch.touch()
    answers = Crowd(system, short_ones).start().finish()
    assert sum(a.timings["replacements"] for a in answers if a.timings) > 0
    until(lambda: process.exit_code() is not None, process.tail)
    assert process.exit_code() == 1
    output = process.output()
    assert FAULT_LINE + fault in output
    assert line in output and "a defect in" in output
    assert "this worker ends, to be started anew" in output
    switch.unlink()
    system.restore()
