"""Workers that come and go while requests run, and orders to them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.client import AnswerError, Client
from support.deployment import Deployment
from support.metrics import Metrics
from support.processes import Process
from support.waiting import free_port, until

pytestmark = pytest.mark.system

PROMPTS = ([5, 9, 12, 40], [77, 3, 200], [60] * 30)
TOKENS = 800


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
    router, url = start([*arguments, "--discover", f"file:{file}", "--worker-drain-s", drain_s])
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


def test_the_admin_api_drains_a_worker_and_sets_its_role(
    start: Callable[[Sequence[str]], tuple[Process, str]], tiny: Deployment
) -> None:
    port = free_port()
    arguments = ["--model", str(tiny.model_path), "--port", "0", "--admin-port", str(port)]
    for handle in tiny.workers.values():
        arguments += ["--worker", f"127.0.0.1:{handle.port}"]
    router, url = start(arguments)
    client = Client(url, tiny.model_path.name)
    admin = httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False)

    def workers() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = admin.get("/workers").json()["workers"]
        return found

    def wait_for(key: str, values: list[str]) -> None:
        until(lambda: [worker[key] for worker in workers()] == values, router.tail, deadline_s=30)

    wait_for("state", ["ready", "ready"])
    wait_for("role", ["prefill", "decode"])
    assert admin.post("/workers/0/drain").json()["drains_because"] == ["asked"]
    answer = client.complete([1, 2, 3], max_tokens=2)
    assert answer.timings is not None
    assert answer.timings["prefill_worker"] == answer.timings["decode_worker"] == "1"
    assert admin.post("/workers/0/undrain").json()["state"] == "ready"
    for role in ("mixed", "prefill"):  # the second one puts it back for other tests
        assert admin.post("/workers/0/role", json={"role": role}).status_code in (200, 202)
        wait_for("role", [role, "decode"])
    admin.close()
    client.close()
    tiny.wait_idle()


def test_a_model_without_workers_leaves_the_other_one_alone(
    start: Callable[[Sequence[str]], tuple[Process, str]],
    tiny: Deployment,
    tiny_models: Callable[[str], Path],
) -> None:
    served, dead = tiny.model_path, tiny_models("qwen3")
    arguments = ["--model", str(served), "--model", f"dead={dead}", "--port", "0"]
    arguments += ["--alias", f"gpt={served.name}"]
    for handle in tiny.workers.values():
        arguments += ["--worker", f"127.0.0.1:{handle.port}"]
    router, url = start(arguments)
    client = Client(url, "gpt")
    until(lambda: client.http.get("/ready").status_code == 200, router.tail, deadline_s=30)
    prompt = PROMPTS[0]
    known = tiny.http.complete(prompt, max_tokens=8).tokens
    assert client.complete(prompt, max_tokens=8).tokens == known
    names = [model["id"] for model in client.http.get("/v1/models").json()["data"]]
    assert names == [served.name, "gpt", "dead"]
    for name, status, says in (
        ("dead", 503, "no worker is up"),
        ("none", 404, f"Served here: {served.name}, gpt, dead."),
    ):
        with pytest.raises(AnswerError, match=says) as refused:
            Client(url, name).complete(prompt, max_tokens=8)
        assert refused.value.status == status
    client.close()
    tiny.wait_idle()
