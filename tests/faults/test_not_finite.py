"""A worker that computes nothing but NaN ends itself; its requests are answered elsewhere."""

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
CROWDS = 10  # its end takes several requests' worth of NaN in a row, each of which goes elsewhere


def test_broken_weights_end_the_worker(
    tiny_model: Path,
    deploy: Callable[[Options], Deployment],
    short_ones: list[Reference],
    tmp_path: Path,
) -> None:
    """Without its end it would fail fast, look idle and draw all further requests."""
    switch = tmp_path / "switch"
    module = ("support.faulty_worker", "weights", str(switch))
    worker = ("--kv-memory", "50000000")
    system = deploy(Options(tiny_model, mixed=2, worker=worker, modules={"mixed-0": module}))
    process = system.workers["mixed-0"].process
    switch.touch()
    crowds = 0
    while process.exit_code() is None and crowds < CROWDS:
        crowds += 1
        answers = Crowd(system, short_ones).start().finish()  # either worker gets some of them
        assert crowds > 1 or sum(a.timings["replacements"] for a in answers if a.timings) > 0
    until(lambda: process.exit_code() is not None, process.tail)
    assert process.exit_code() == 1
    output = process.output()
    assert FAULT_LINE + "weights" in output
    assert "NotFiniteError" in output and "this worker ends, to be started anew" in output
    switch.unlink()
    system.restore()
