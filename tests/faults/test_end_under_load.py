"""A worker that is told to end under load loses no request, and none is placed again for it."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from support.crowd import Crowd
from support.deployment import Deployment, Options
from support.pace import Pace
from support.reference import Reference
from support.waiting import until

pytestmark = pytest.mark.faults

# Longer than any test here takes: what ends before has drained.
DRAIN_S = "300"


@pytest.fixture
def system(tiny_model: Path, deploy: Callable[[Options], Deployment], pace: Pace) -> Deployment:
    """Of each test, so that nothing is cached where a prompt would then go whole."""
    names = ("prefill-0", "prefill-1", "decode-0", "decode-1")
    options = ("--kv-memory", "50000000", "--max-batched-tokens", "256", "--drain-s", DRAIN_S)
    return deploy(
        Options(tiny_model, prefill=2, decode=2, worker=options, modules=pace.modules(*names))
    )


def number(system: Deployment, name: str) -> str:
    """A worker's name at the router."""
    return str(list(system.workers).index(name))


def draining(system: Deployment, name: str) -> bool:
    """Whether the router has heard it."""
    drains = system.metrics().sum("tasuki_worker_draining", worker=number(system, name))
    return drains == 1


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_a_worker_drains_under_load(
    system: Deployment, sixteen: list[Reference], pace: Pace, role: str
) -> None:
    name = f"{role}-0"
    process = system.workers[name].process
    before = system.retries()
    crowd = Crowd(system, sixteen)
    with pace.slow(role):
        crowd.start()
        until(lambda: system.worker_holds(name)["running"], lambda: f"work\n{system.logs()}")
        process.signal(signal.SIGTERM)
        until(lambda: "draining" in process.output(), process.tail)
        assert crowd.unfinished() > 0, "everything was over before the signal"
        # What comes now goes elsewhere, beside what runs here.
        until(
            lambda: draining(system, name) or process.exit_code() is not None,
            lambda: f"the router to hear\n{system.logs()}",
        )
        answer = system.http.complete([7, 8, 9], max_tokens=2)
        assert answer.timings is not None
        served_by = (answer.timings["prefill_worker"], answer.timings["decode_worker"])
        assert number(system, name) not in served_by
        if role == "decode":  # prompts may be over by now, answers are not
            assert process.exit_code() is None, "it waits for what runs"
    answers = crowd.finish()
    assert process.wait() == 0, process.tail()
    assert "drained" in process.output()
    placed = [answer.timings[f"{role}_worker"] for answer in answers if answer.timings]
    assert number(system, name) in placed, "none of the requests was there"
    assert [a.timings["replacements"] for a in answers if a.timings] == [0] * len(sixteen)
    assert system.retries() == before


def test_a_second_signal_ends_it_at_once(
    system: Deployment, sixteen: list[Reference], pace: Pace
) -> None:
    process = system.workers["decode-1"].process
    before = system.retries()
    crowd = Crowd(system, sixteen)
    with pace.slow("decode"):
        crowd.start()
        until(
            lambda: system.worker_holds("decode-1")["running"],
            lambda: f"work\n{system.logs()}",
        )
        process.signal(signal.SIGTERM)
        until(lambda: "draining" in process.output(), process.tail)
        process.signal(signal.SIGTERM)
        assert process.wait() == 0, process.tail()
        assert crowd.unfinished() > 0
    crowd.finish()
    assert system.retries() > before, "its requests were placed again"


def test_ctrl_c_ends_an_idle_worker(system: Deployment) -> None:
    """A router that has no leg there keeps it for as long as a submit may be on its way."""
    process = system.workers["decode-0"].process
    process.signal(signal.SIGINT)
    assert process.wait() == 0, process.tail()
    assert "drained" in process.output()
