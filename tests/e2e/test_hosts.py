"""One worker over two hosts, which are network namespaces with a link between them."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.client import Client
from support.deployment import ROLE_PREFERENCE, Deployment
from support.metrics import Metrics
from support.models import VOCAB_SIZE
from support.namespace import Namespace
from support.processes import Process
from support.waiting import until

from tasuki.worker.config import KEY_VARIABLE

NEAR, FAR = "10.99.0.1", "10.99.0.2"
START_DEADLINE_S = 240.0
Start = Callable[[Namespace, str, str], Process]


@pytest.fixture
def hosts() -> Iterator[tuple[Namespace, Namespace]]:
    far = Namespace()
    near = Namespace(
        "link add near type veth peer name far",
        f"link set far netns {far.path()}",
        f"addr add {NEAR}/24 dev near",
        "link set near up",
    )
    far.ip(f"addr add {FAR}/24 dev far", "link set far up")
    yield near, far
    near.close()
    far.close()


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    monkeypatch.setenv(KEY_VARIABLE, "a secret of many characters")
    started: list[Process] = []

    def run(where: Namespace, name: str, words: str) -> Process:
        process = Process(name, words.split(), tmp_path / f"{name}.log")
        where.run(process.start)
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()


@pytest.mark.timeout(900)
def test_a_model_over_two_hosts(
    hosts: tuple[Namespace, Namespace], start: Start, tiny: Deployment, tiny_model: Path
) -> None:
    near, far = hosts
    draw = random.Random(7)
    prompt = [draw.randrange(3, VOCAB_SIZE) for _ in range(300)]
    assert tiny.client is not None
    expected = tiny.client.complete(prompt, max_tokens=20).tokens

    settings = f"--model {tiny_model} --dtype float32 --device cpu --kv-memory 16MB"
    nodes = f"--tp 2 --nodes {NEAR}:7100,{FAR}"

    def start_divided(bind: str = "") -> tuple[Process, Process]:
        words = f"worker --name prefill-0 --role prefill {settings} {nodes} {bind}"
        return (
            start(near, "first", f"{words} --rank 0 --port 7001"),
            start(far, "second", f"{words} --rank 1"),
        )

    first, second = start_divided()
    words = f"worker --name decode-0 --role decode {settings} --host {NEAR} --port 7002"
    decode = start(near, "decode", words)
    for each in (first, decode):
        each.wait_for_line("ready ", deadline_s=START_DEADLINE_S)
    router = start(
        near,
        "router",
        f"router --model {tiny_model} --served-model-name m --host {NEAR} --port 0"
        f" --worker {NEAR}:7001 --worker {NEAR}:7002 --role-preference {ROLE_PREFERENCE}"
        f" --metrics-listen {NEAR}:7003",
    )
    client = Client(router.wait_for_line("listening on ", deadline_s=60), "m")
    metrics = Client(f"http://{NEAR}:7003", "m")

    def connected() -> bool:
        text = near.run(metrics.http.get, "/metrics").text
        return Metrics(text).sum("tasuki_worker_up") == 2

    def answer() -> list[int]:
        return near.run(client.complete, prompt, max_tokens=20).tokens

    until(connected, router.tail)
    assert answer() == expected
    pulled = Metrics(near.run(metrics.http.get, "/metrics").text)
    assert pulled.sum("tasuki_worker_kv_pulled_blocks_total") >= 300 // 16

    # The other host vanishes without a word: the worker ends, its request goes elsewhere.
    near.ip("link set near down")
    assert answer() == expected
    assert first.wait(deadline_s=90) == 1
    assert "rank 1: it has ended, or its host is lost" in first.output()
    assert second.wait(deadline_s=90) in (0, 1)

    near.ip("link set near up")
    first, second = start_divided(f"--host 0.0.0.0 --advertise {NEAR}")
    first.wait_for_line("ready ", deadline_s=START_DEADLINE_S)
    until(connected, router.tail)
    assert answer() == expected

    # The other host is told to end: the worker drains, and ends on both.
    second.signal(signal.SIGTERM)
    assert first.wait(deadline_s=60) == 0, first.tail()
    assert second.wait(deadline_s=60) == 0, second.tail()
    assert "host 1 was told to end: the worker drains" in first.output()
    assert "drained" in first.output()
    assert answer() == expected

    # The first host's worker ends: so does the other host's part.
    first, second = start_divided()
    first.wait_for_line("ready ", deadline_s=START_DEADLINE_S)
    first.kill()
    assert second.wait(deadline_s=60) in (0, 1)
