"""A worker that hangs is noticed, ends and is replaced; its clients only wait.

Nothing of a hung worker breaks by itself: its streams stay open, its peers' leases
are extended. Without the watchdog each of these tests runs into its deadline.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.crowd import Crowd
from support.deployment import Deployment, Options
from support.faulty_worker import FAULT_LINE
from support.pace import Pace
from support.processes import further_ranks, has_ended
from support.reference import Reference
from support.waiting import until

pytestmark = pytest.mark.faults

STEP_TIMEOUT_S = 4.0
END_S = 60.0  # on a busy machine; the limit itself is STEP_TIMEOUT_S
WORKER = ("--kv-memory", "50000000", "--step-timeout-s", f"{STEP_TIMEOUT_S:g}")


@pytest.fixture
def switch(tmp_path: Path) -> Path:
    """The file that makes a faulty worker fail."""
    return tmp_path / "switch"


def health_states(port: int) -> Iterator[int]:
    """What the worker's health service says, from now on."""
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            for answer in stub.Watch(health_pb2.HealthCheckRequest()):
                yield answer.status
        except grpc.RpcError:
            return  # the worker has ended


def until_ended_by_watchdog(system: Deployment, name: str) -> None:
    """Waits for the worker's end, which has to be the watchdog's doing."""
    process = system.workers[name].process
    until(
        lambda: process.exit_code() is not None,
        lambda: f"the end of {name}:\n{process.tail()}",
        deadline_s=END_S,
    )
    assert process.exit_code() == 1, process.tail()
    assert "no progress" in process.output() and "--step-timeout-s" in process.output()


@pytest.mark.parametrize("fault", ["call", "device"])
def test_a_step_that_never_ends(
    fault: str,
    tiny_model: Path,
    deploy: Callable[[Options], Deployment],
    sixteen: list[Reference],
    switch: Path,
) -> None:
    """On the CPU the call hangs, on a device the step: every answer still arrives, exact."""
    module = ("support.faulty_worker", fault, str(switch))
    options = Options(tiny_model, mixed=2, worker=WORKER, modules={"mixed-0": module})
    system = deploy(options)
    port = system.workers["mixed-0"].port
    states: list[int] = []
    watch = threading.Thread(target=lambda: states.extend(health_states(port)), daemon=True)
    watch.start()
    switch.touch()  # from the fifth token of an answer on
    crowd = Crowd(system, sixteen).start()
    until_ended_by_watchdog(system, "mixed-0")
    assert FAULT_LINE + fault in system.workers["mixed-0"].process.output()
    answers = crowd.finish()
    assert sum(a.timings["replacements"] for a in answers if a.timings) > 0
    watch.join(END_S)
    serving = health_pb2.HealthCheckResponse
    assert states == [serving.SERVING, serving.NOT_SERVING]
    switch.unlink()
    system.restore()


def test_a_rank_that_hangs(
    tiny_model: Path,
    deploy: Callable[[Options], Deployment],
    sixteen: list[Reference],
    pace: Pace,
) -> None:
    """The first rank waits for it in a collective, which has no end of its own."""
    modules = pace.modules("mixed-0", "mixed-1")
    system = deploy(Options(tiny_model, mixed=2, worker=(*WORKER, "--tp", "2"), modules=modules))
    (rank,) = further_ranks("mixed-0")
    with pace.slow("mixed"):
        crowd = Crowd(system, sixteen).start()
        crowd.wait_received(requests=16, tokens=5)
        rank.send_signal(signal.SIGSTOP)
    until_ended_by_watchdog(system, "mixed-0")
    answers = crowd.finish()
    assert sum(a.timings["replacements"] for a in answers if a.timings) > 0
    until(lambda: has_ended(rank), "the end of the frozen rank", deadline_s=END_S)
    system.restore()
