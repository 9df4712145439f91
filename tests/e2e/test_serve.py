"""`tasuki serve`: the whole product in one command, started and ended as a user would."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from support.client import Client
from support.processes import Process
from support.waiting import until

START_DEADLINE_S = 120.0
Serve = Callable[..., Process]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    started: list[Process] = []

    def start(*arguments: str) -> Process:
        log = tmp_path / f"serve-{len(started)}.log"
        started.append(Process("serve", ["serve", *arguments], log))
        started[-1].start()
        return started[-1]

    yield start
    for process in started:
        if process.exit_code() is None:
            children = process.descendants()
            process.kill()
            for child in children:
                if child.is_running():
                    child.kill()


def wait_for_url(process: Process) -> str:
    def probe() -> str | None:
        assert process.exit_code() is None, process.output()
        found = re.search(r"^Serving .* at (http://127\.0\.0\.1:\d+)$", process.output(), re.M)
        return found.group(1) if found else None

    return until(probe, lambda: f"a URL in\n{process.output()}", deadline_s=START_DEADLINE_S)


def wait_ready(client: Client) -> None:
    until(lambda: client.http.get("/ready").status_code == 200, "readiness", deadline_s=60)


def model_name(client: Client) -> str:
    return str(client.http.get("/v1/models").json()["data"][0]["id"])


def workers_of(process: Process) -> dict[str, psutil.Process]:
    """Worker processes under the launcher, by their `--name`."""
    found = {}
    for child in process.descendants():
        try:
            command = child.cmdline()
        except psutil.NoSuchProcess:
            continue
        if "worker" in command and "--name" in command:
            found[command[command.index("--name") + 1]] = child
    return found


def test_serves_restarts_and_leaves_nothing_behind(serve: Serve, tiny_model: Path) -> None:
    process = serve("--model", str(tiny_model), "--dtype", "float32", "--port", "0")
    url = wait_for_url(process)
    client = Client(url, "")
    wait_ready(client)
    client.model = model_name(client)
    answer = client.complete("gong bast", max_tokens=20)
    assert len(answer.tokens) == 20

    # What it prints works as pasted: a curl command and an openai snippet.
    assert "curl" in process.output() and "openai" in process.output().lower()

    # A worker that dies is started again and rejoins.
    workers = workers_of(process)
    assert sorted(workers) == ["decode-0", "prefill-0"]
    workers["decode-0"].kill()
    assert client.complete("gong bast", max_tokens=20).tokens == answer.tokens
    until(
        lambda: (
            (again := workers_of(process).get("decode-0")) is not None
            and again.pid != workers["decode-0"].pid
            and decode_is_known(client)
        ),
        lambda: f"decode-0 back\n{process.tail()}",
        deadline_s=60,
        interval_s=0.2,
    )
    assert client.complete("gong bast", max_tokens=20).tokens == answer.tokens

    # Ctrl-C: the group gets SIGINT, as from a terminal.
    children = process.descendants()
    assert len(children) >= 3
    process.signal(signal.SIGINT)
    assert process.wait(deadline_s=30) == 0, process.tail()
    assert not [child for child in children if child.is_running() and not is_zombie(child)]
    client.close()


def decode_is_known(client: Client) -> bool:
    text = client.http.get("/metrics").text
    return len(re.findall(r'^tasuki_worker_total_blocks\{.*role="decode"', text, re.M)) == 1


def is_zombie(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_killed_launcher_takes_its_children_along(serve: Serve, tiny_model: Path) -> None:
    process = serve("--model", str(tiny_model), "--dtype", "float32", "--mixed", "1")
    wait_for_url(process)
    children = process.descendants()
    assert len(children) >= 2
    os.kill(process.pid, signal.SIGKILL)
    until(
        lambda: not [c for c in children if c.is_running() and not is_zombie(c)],
        "children gone with their launcher",
    )


def test_unsupported_model_ends_with_the_workers_own_error(
    serve: Serve, tiny_model: Path, tmp_path: Path
) -> None:
    bad = tmp_path / "bad-model"
    shutil.copytree(tiny_model, bad)
    config = (bad / "config.json").read_text()
    config = config.replace("LlamaForCausalLM", "NoSuchForCausalLM")
    (bad / "config.json").write_text(config.replace('"llama"', '"no_such_model"'))
    process = serve("--model", str(bad), "--dtype", "float32")
    assert process.wait(deadline_s=60) != 0
    assert "no_such_model" in process.output() or "NoSuchForCausalLM" in process.output()
    assert "Traceback" not in process.output()


def test_broken_weights_end_with_the_workers_own_error(
    serve: Serve, tiny_model: Path, tmp_path: Path
) -> None:
    bad = tmp_path / "bad-weights"
    shutil.copytree(tiny_model, bad)
    weights = next(bad.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:1000])
    process = serve("--model", str(bad), "--dtype", "float32")
    assert process.wait(deadline_s=60) != 0
    assert "safetensors" in process.output()


def test_idle_workers_use_little_processor(serve: Serve, tiny_model: Path) -> None:
    """Under 3% of a core each, after real work has started every thread."""
    process = serve("--model", str(tiny_model), "--dtype", "float32")
    client = Client(wait_for_url(process), "")
    wait_ready(client)
    client.model = model_name(client)
    client.complete("gong bast", max_tokens=20)
    workers = workers_of(process)
    assert len(workers) == 2
    window_s = 10.0

    def used() -> dict[str, float]:
        times = {name: worker.cpu_times() for name, worker in workers.items()}
        return {name: time.user + time.system for name, time in times.items()}

    before = used()
    time.sleep(window_s)  # the window of the measurement
    shares = {name: (after - before[name]) / window_s for name, after in used().items()}
    print(shares)
    client.close()
    assert max(shares.values()) < 0.03, shares
