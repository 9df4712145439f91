"""`tasuki serve`: the whole product in one command, started and ended as a user would."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from support.client import Client
from support.processes import Process, environment, has_ended
from support.serving import (
    START_DEADLINE_S,
    Serve,
    decode_is_known,
    wait_for_url,
    workers_of,
)
from support.waiting import free_port, until


def wait_ready(client: Client) -> None:
    until(lambda: client.http.get("/ready").status_code == 200, "readiness", deadline_s=60)


def model_name(client: Client) -> str:
    return str(client.http.get("/v1/models").json()["data"][0]["id"])


def printed(process: Process, beginning: str) -> str:
    """What the banner says from the line that begins so to the next empty one."""
    lines = process.output().splitlines()
    start = next(at for at, line in enumerate(lines) if line.startswith(beginning))
    return "\n".join(lines[start : lines.index("", start)])


def paste(*command: str) -> str:
    """What a command prints."""
    done = subprocess.run(
        command,
        env=environment(NO_PROXY="127.0.0.1", PYTHONUTF8="1"),
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


def listening_at(process: Process) -> set[str]:
    """Addresses at which the launcher and everything under it take connections."""
    family = [psutil.Process(process.pid), *process.descendants()]
    sockets = [socket for each in family for socket in each.net_connections("inet")]
    listening = [s.laddr.ip for s in sockets if s.status == psutil.CONN_LISTEN]
    return {address.removeprefix("::ffff:") for address in listening}


def test_serves_restarts_and_leaves_nothing_behind(serve: Serve, tiny_model: Path) -> None:
    settings = ("--dtype", "float32", "--max-model-len", "512", "--port", "0")
    process = serve("--model", str(tiny_model), *settings)
    url = wait_for_url(process)
    client = Client(url, "")
    wait_ready(client)
    client.model = model_name(client)
    answer = client.complete("gong bast", max_tokens=20)
    assert len(answer.tokens) == 20

    # What it prints works as pasted.
    assert paste(sys.executable, "-c", printed(process, "from openai import")).strip()
    document = json.loads(paste("sh", "-c", printed(process, "curl ")))
    assert document["choices"][0]["message"]["content"]

    # Real work has started every thread: idle workers use little processor.
    assert max(idle_shares(process, window_s=10.0).values()) < 0.03

    # It says what it settled on, worker by worker, and stays on this machine.
    for name in ("prefill-0", "decode-0"):
        said = rf"^{name} *\| .*KV pool: .* MB \(--kv-memory\).* 512 tokens \(--max-model-len\)$"
        assert re.search(said, process.output(), re.M), process.output()
    assert "dtype float32" in process.output()
    assert listening_at(process) == {"127.0.0.1"}

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

    # Ctrl-C: what runs may end, then everything does; the dead worker's logs stay.
    children = process.descendants()
    assert len(children) >= 3
    begun = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        last = pool.submit(
            client.stream, "gong bast", max_tokens=400, on_token=lambda _: begun.set()
        )
        assert begun.wait(30)
        process.signal(signal.SIGINT)
        assert len(last.result(60).tokens) == 400
    assert process.wait(deadline_s=30) == 0, process.tail()
    assert all(map(has_ended, children)), children
    kept = re.search(r"^tasuki: logs kept in (.*)$", process.output(), re.M)
    assert kept is not None, process.output()
    assert (Path(kept[1]) / "decode-0.log").read_text().count("--- decode-0 started") == 2
    client.close()


def idle_shares(process: Process, window_s: float) -> dict[str, float]:
    """What part of a core each worker uses while nothing is asked of it."""
    workers = workers_of(process)
    assert len(workers) == 2

    def used() -> dict[str, float]:
        times = {name: worker.cpu_times() for name, worker in workers.items()}
        return {name: time.user + time.system for name, time in times.items()}

    before = used()
    time.sleep(window_s)  # the window of the measurement
    shares = {name: (after - before[name]) / window_s for name, after in used().items()}
    print(shares)
    return shares


def test_killed_launcher_takes_its_children_along(serve: Serve, tiny_model: Path) -> None:
    process = serve("--model", str(tiny_model), "--dtype", "float32", "--mixed", "1")
    wait_for_url(process)
    children = process.descendants()
    assert len(children) >= 2
    os.kill(process.pid, signal.SIGKILL)
    until(lambda: all(map(has_ended, children)), "children gone with their launcher")


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


def test_a_router_that_cannot_start_ends_the_start_before_the_model_is_loaded(
    serve: Serve, tiny_model: Path, tmp_path: Path
) -> None:
    log = tmp_path / "missing" / "requests.log"
    process = serve("--model", str(tiny_model), "--dtype", "float32", "--request-log", str(log))
    assert process.wait(deadline_s=60) == 1
    assert f"--request-log {log}: No such file" in process.output()
    named = re.search(r"Its whole log: (\S+)/router\.log", process.output())
    assert named is not None, process.output()
    workers = [Path(named[1]) / f"{name}.log" for name in ("prefill-0", "decode-0")]
    assert not any("ready " in each.read_text() for each in workers if each.exists())


def test_a_start_that_takes_too_long_ends_and_keeps_the_logs_it_names(
    serve: Serve, tiny_model: Path
) -> None:
    process = serve("--model", str(tiny_model), "--dtype", "float32", "--startup-timeout", "0.2")
    assert process.wait(deadline_s=60) == 1
    named = re.search(r"prefill-0, decode-0 not ready after 0\.2 s; see (\S+),", process.output())
    assert named is not None, process.output()
    assert (Path(named[1]) / "decode-0.log").is_file()


def test_the_demo_answers_accounts_for_its_time_and_ends(tiny_model: Path, tmp_path: Path) -> None:
    arguments = ["demo", "--model", str(tiny_model), "--dtype", "float32"]
    process = Process("demo", arguments, tmp_path / "demo.log")
    process.start()
    assert process.wait(deadline_s=START_DEADLINE_S) == 0
    for said in ("where the time went", "KV moved: 0.", "tasuki: stopped"):
        assert said in process.output(), process.output()
    assert re.search(r"from worker (\d) to (?!\1)\d", process.output()), process.output()


def test_api_keys_are_made_required_and_withdrawn_and_the_dashboard_needs_none(
    serve: Serve, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [sys.executable, "-m", "tasuki", "api-key", "web", "--max-requests", "1"]
    made = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    key = made.stderr.split()[-1]
    assert key not in made.stdout
    keys = tmp_path / "keys"
    keys.write_text(made.stdout)
    monkeypatch.setenv("OWN_KEY", "tk-own")
    settings = ("--dtype", "float32", "--max-model-len", "512", "--port", "0", "--mixed", "1")
    required = ("--api-keys-file", str(keys), "--api-key-env", "OWN_KEY")
    admin = ("--admin-port", str(free_port()))
    process = serve("--model", str(tiny_model), *settings, *required, *admin)
    client = Client(wait_for_url(process), tiny_model.name)

    def status(key: str | None) -> int:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        body = {"prompt": [5, 6, 7], "max_tokens": 2}
        return client.http.post("/v1/completions", json=body, headers=headers).status_code

    assert (status(None), status("tk-other"), status(key), status("tk-own")) == (401, 401, 200, 200)
    # The environment has the key that the pasted line names.
    pasted = paste("bash", "-c", printed(process, "curl "))
    assert json.loads(pasted)["object"] == "chat.completion"
    dashboard = re.search(
        r"dashboard: (http://127\.0\.0\.1:\d+/dashboard)$", process.output(), re.M
    )
    assert dashboard is not None, process.output()
    assert "<title>Tasuki dashboard</title>" in paste("curl", "-s", dashboard[1])
    keys.write_text("")
    until(lambda: status(key) == 401, "the key is withdrawn", deadline_s=20)
    assert status("tk-own") == 200
    assert key not in process.output()
