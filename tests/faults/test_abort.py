"""A worker of `tasuki serve` aborts in the middle of handoffs, as its transport's library may.

UCX and NIXL end a process by SIGABRT where they find their own state broken. The launcher starts
the worker again under its name, its requests are placed again, and the new process hands over KV.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
from support.client import Client
from support.crowd import Crowd
from support.deployment import ROLE_PREFERENCE
from support.metrics import Metrics
from support.models import VOCAB_SIZE
from support.processes import Process
from support.reference import Reference
from support.serving import Serve, wait_for_url, workers_of
from support.waiting import until

pytestmark = pytest.mark.faults

RESTART_S = 90.0  # imports and a load, on a busy machine


class System:
    """One prefill and one decode worker under a launcher."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.http = Client(wait_for_url(process), "")
        until(lambda: self.http.http.get("/ready").status_code == 200, self.logs, deadline_s=60)
        until(lambda: self.total("worker_up") == 2, self.logs, deadline_s=60)
        self.http.model = str(self.http.http.get("/v1/models").json()["data"][0]["id"])

    def logs(self) -> str:
        return self.process.tail(80)

    def total(self, name: str, **labels: str) -> float:
        """A metric, summed; 0 where nothing has happened yet."""
        found = Metrics(self.http.http.get("/metrics").text).find(f"tasuki_{name}", **labels)
        return sum(sample.value for sample in found)

    def worker(self, name: str) -> psutil.Process | None:
        return workers_of(self.process).get(name)

    def moves_kv(self, draw: random.Random) -> bool:
        """Whether a new prompt is prefilled by one worker and decoded by the other one."""
        prompt = [draw.randrange(3, VOCAB_SIZE) for _ in range(200)]
        timings = self.http.stream(prompt, max_tokens=4).timings
        return timings is not None and timings["transfer_bytes"] > 0


@pytest.fixture
def system(serve: Serve, tiny_model: Path) -> System:
    words = ["--model", str(tiny_model), "--dtype", "float32", "--port", "0"]
    words += ["--prefill", "1", "--decode", "1", "--kv-memory", "50000000"]
    words += ["--no-admission"]  # requests wait at the workers, however slow prompts are
    return System(serve(*words, "--role-preference", str(ROLE_PREFERENCE)))


def hold_handoffs(system: System, references: Sequence[Reference]) -> Crowd:
    """A crowd whose decode legs wait for KV that the prefill worker, stopped, does not compute."""
    prefill = system.worker("prefill-0")
    assert prefill is not None
    crowd = Crowd(system, references)  # before: after 4 s of silence they would get nothing
    prefill.suspend()
    crowd.start()
    until(  # where roles are preferences, the decode worker may compute some as a whole
        lambda: system.total("worker_waiting", role="decode") > len(references) / 2,
        lambda: f"requests that wait for their KV\n{system.logs()}",
        interval_s=0.01,
    )
    return crowd


def abort(worker: psutil.Process) -> None:
    worker.send_signal(signal.SIGABRT)
    worker.wait(60)


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
def test_a_worker_that_aborts_in_handoffs_is_restarted_and_hands_over_again(
    system: System, sixteen: list[Reference], victim: str
) -> None:
    draw = random.Random(f"abort {victim}")
    assert system.moves_kv(draw), "the pair is connected"
    before = {name: system.worker(name) for name in ("prefill-0", "decode-0")}
    prefill, decode = before["prefill-0"], before["decode-0"]
    assert prefill is not None and decode is not None
    retries = system.total("retries_total")
    crowd = hold_handoffs(system, sixteen)
    if victim == "decode-0":
        abort(decode)
        prefill.resume()
    else:  # it dies with KV that the decode worker, stopped, has asked for and not read
        decode.suspend()
        prefill.resume()
        until(
            lambda: system.total("worker_leased_blocks", role="prefill") > 0,
            lambda: f"KV to read\n{system.logs()}",
            interval_s=0.001,
        )
        abort(prefill)
        decode.resume()

    answers = crowd.finish(deadline_s=RESTART_S)  # compared, each of them
    assert sum(each.timings["replacements"] for each in answers if each.timings) > 0
    assert system.total("retries_total") > retries
    assert f"tasuki: {victim} died (signal SIGABRT)" in system.process.output()
    until(
        lambda: f"tasuki: {victim} is back" in system.process.output(),
        system.logs,
        deadline_s=RESTART_S,
    )
    after = {name: system.worker(name) for name in before}
    assert {name for name in before if before[name] != after[name]} == {victim}
    until(lambda: system.total("worker_up") == 2, system.logs, deadline_s=60)
    until(lambda: system.moves_kv(draw), system.logs, deadline_s=60, interval_s=0.2)
    held = ("waiting", "running", "leased_blocks", "quarantined_blocks")
    until(
        lambda: (
            not any(system.total(f"worker_{each}") for each in held)
            and system.total("worker_free_blocks") == system.total("worker_total_blocks")
        ),
        system.logs,
        deadline_s=60,
    )
    system.process.signal(signal.SIGINT)
    assert system.process.wait(deadline_s=30) == 0, system.logs()
