"""Workers that come and go while requests run."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from support.client import Client
from support.deployment import Deployment
from support.metrics import Metrics
from support.processes import Process
from support.waiting import until

pytestmark = pytest.mark.system

PROMPTS = ([5, 9, 12, 40], [77, 3, 200], [60] * 30)
TOKENS = 400


def list_workers(file: Path, *addresses: str) -> None:
    """Replaces the file as a whole."""
    new = file.with_suffix(".new")
    new.write_text("# workers\n" + "".join(f"{address}\n" for address in addresses))
    os.replace(new, file)


@pytest.mark.parametrize("drain_s", ["600", "0"])
def test_a_file_moves_the_work_from_one_worker_to_another(
    start: Callable[[Sequence[str]], tuple[Process, str]],
    tiny: Deployment,
    tmp_path: Path,
    drain_s: str,
) -> None:
    first, second = (f"127.0.0.1:{worker.port}" for worker in tiny.workers.values())
    file = tmp_path / "workers"
    list_workers(file)
    arguments = ["--model", str(tiny.model_path), "--served-model-name", tiny.model, "--port", "0"]
    router, url = start([*arguments, "--workers-file", str(file), "--worker-drain-s", drain_s])
    client = Client(url, tiny.model)
    assert client.http.get("/ready").status_code == 503
    known = [
        answer.tokens
        for answer in tiny.gather(
            [partial(tiny.http.complete, prompt, max_tokens=TOKENS) for prompt in PROMPTS]
        )
    ]

    def workers(gauge: str) -> set[str]:
        metrics = Metrics(client.http.get("/metrics").text)
        found = metrics.find(f"tasuki_worker_{gauge}")
        return {sample.labels["worker"] for sample in found if sample.value}

    def wait_for(what: str, probe: Callable[[], bool]) -> None:
        until(probe, lambda: f"{what}\n{router.tail()}", deadline_s=30)

    list_workers(file, first)
    wait_for("readiness", lambda: client.http.get("/ready").status_code == 200)
    begun = threading.Barrier(len(PROMPTS) + 1)

    def stream(prompt: list[int]) -> list[int]:
        def on_token(answer: object) -> None:
            nonlocal waits
            if waits:
                waits = False
                begun.wait(timeout=60)

        waits = True
        return client.stream(prompt, max_tokens=TOKENS, on_token=on_token).tokens

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        streams = [pool.submit(stream, prompt) for prompt in PROMPTS]
        begun.wait(timeout=60)
        list_workers(file, second)
        wait_for("the second worker", lambda: "1" in workers("up"))
        answer = client.complete([1, 2, 3], max_tokens=2)
        assert answer.timings is not None
        assert answer.timings["prefill_worker"] == answer.timings["decode_worker"] == "1"
        assert [each.result() for each in streams] == known
    wait_for("the first worker's end", lambda: workers("up") == {"1"})
    retries = Metrics(client.http.get("/metrics").text).find("tasuki_retries_total")
    assert bool(retries) == (drain_s == "0")
    assert "worker leaves" in router.output()
    client.close()
    tiny.wait_idle()
