"""The router's process: how it starts, drains and ends; workers are another matter."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import httpx
import pytest
from support.client import Client
from support.deployment import Deployment
from support.processes import Process
from support.waiting import free_port, until

pytestmark = pytest.mark.system

START_DEADLINE_S = 30.0


def get(url: str) -> httpx.Response:
    return httpx.get(url, trust_env=False, timeout=10)


def test_without_workers_it_lives_but_is_not_ready(
    start: Callable[[Sequence[str]], tuple[Process, str]], tiny_model: Path
) -> None:
    port = free_port()
    arguments = ["--model", str(tiny_model), "--worker", f"127.0.0.1:{port}", "--port", "0"]
    process, url = start([*arguments, "--readiness-grace-s", "0"])
    assert url.startswith("http://127.0.0.1:")
    assert get(f"{url}/live").status_code == 200
    body = {"prompt": "x", "max_tokens": 2}
    answers = [get(f"{url}/health"), get(f"{url}/ready")]
    answers.append(httpx.post(f"{url}/v1/completions", json=body, trust_env=False))
    for answer in answers:
        assert answer.status_code == 503, answer.text
        assert int(answer.headers["retry-after"]) > 0
        message = answer.json()["error"]["message"]
        assert message
        assert str(port) not in answer.text and "127.0.0.1" not in answer.text
    tokens = httpx.post(f"{url}/tokenize", json={"prompt": "bast"}, trust_env=False).json()
    assert tokens["count"] == len(tokens["tokens"]) > 0
    process.signal(signal.SIGTERM)
    assert process.wait() == 0


def test_it_serves_on_where_nobody_reads_its_log(tiny_model: Path) -> None:
    words = ["router", "--model", str(tiny_model), "--port", "0", "--readiness-grace-s", "0"]
    words += ["--worker", f"127.0.0.1:{free_port()}"]
    command = [sys.executable, "-m", "tasuki", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        try:
            assert process.stdout is not None
            said = iter(process.stdout.readline, b"")
            _, _, url = next(x for x in said if b"listening on" in x).decode().rpartition(" ")
            process.stdout.close()
            body = {"prompt": "x", "max_tokens": 2}
            for _ in range(3):
                completions = f"{url.strip()}/v1/completions"
                answer = httpx.post(completions, json=body, trust_env=False)
                assert answer.status_code == 503, answer.text
            process.send_signal(signal.SIGTERM)
            assert process.wait(START_DEADLINE_S) == 0
        finally:
            process.kill()


def test_metrics_have_a_port_of_their_own_where_clients_come_from_a_network(
    start: Callable[[Sequence[str]], tuple[Process, str]], tiny_model: Path
) -> None:
    metrics = f"127.0.0.1:{free_port()}"
    arguments = ["--model", str(tiny_model), "--worker", f"127.0.0.1:{free_port()}"]
    arguments += ["--port", "0", "--metrics-listen", metrics]
    _, url = start([*arguments, "--host", "0.0.0.0"])
    answer = get(url.replace("0.0.0.0", "127.0.0.1") + "/metrics")
    assert answer.status_code == 404
    assert "--metrics-listen" in answer.json()["error"]["message"]
    assert get(f"http://{metrics}/metrics").text.endswith("# EOF\n")
    assert get(f"http://{metrics}/v1/models").status_code == 404
    for host in ("127.0.0.1", "::1", "localhost"):
        _, url = start([*arguments[:-2], "--host", host])
        assert get(f"{url}/metrics").status_code == 200, host


def test_a_port_that_is_taken_is_named(tiny_model: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        arguments = ["router", "--model", str(tiny_model), "--worker", "127.0.0.1:1"]
        process = Process("router", [*arguments, "--port", port], tmp_path / "log")
        process.start()
        assert process.wait() == 1
    assert port in process.output() and "cannot listen" in process.output()


def beside(tiny: Deployment, *more: str, grace_s: str = "0") -> list[str]:
    """Arguments of a further router in front of the workers of `tiny`."""
    arguments = ["--model", str(tiny.model_path), "--served-model-name", tiny.model, "--port", "0"]
    arguments += ["--readiness-grace-s", grace_s]
    for worker in tiny.workers.values():
        arguments += ["--worker", f"127.0.0.1:{worker.port}"]
    return [*arguments, *more]


def open_stream(client: Client, tokens: int) -> tuple[httpx.Response, Iterator[str]]:
    """A stream that has begun."""
    body = {"model": client.model, "prompt": "bast", "max_tokens": tokens, "ignore_eos": True}
    request = client.http.build_request(
        "POST", "/v1/completions", json={**body, "stream": True, "temperature": 0}
    )
    response = client.http.send(request, stream=True)
    assert response.status_code == 200
    lines = response.iter_lines()
    assert next(lines).startswith("data: ")
    return response, lines


def ready_client(url: str, tiny: Deployment) -> Client:
    client = Client(url, tiny.model)
    until(
        lambda: client.http.get("/ready").status_code == 200,
        lambda: "the second router to be ready",
        deadline_s=START_DEADLINE_S,
    )
    return client


def test_sigterm_turns_readiness_off_and_serves_for_the_grace(
    start: Callable[[Sequence[str]], tuple[Process, str]], tiny: Deployment
) -> None:
    process, url = start(beside(tiny, grace_s="3"))
    client = ready_client(url, tiny)
    process.signal(signal.SIGTERM)
    until(
        lambda: client.http.get("/ready").status_code == 503,
        lambda: "the router to be no longer ready",
        deadline_s=10,
    )
    body = {"model": tiny.model, "prompt": "x", "max_tokens": 1}
    assert client.http.post("/v1/completions", json=body).status_code == 200
    until(
        lambda: refuses_or_is_gone(client, body),
        lambda: "the end of the grace",
        deadline_s=20,
    )
    client.close()
    assert process.wait() == 0


def refuses_or_is_gone(client: Client, body: dict[str, object]) -> bool:
    try:
        return client.http.post("/v1/completions", json=body).status_code == 503
    except httpx.TransportError:
        return True


def test_draining_finishes_what_runs_and_takes_nothing_new(
    start: Callable[[Sequence[str]], tuple[Process, str]], tiny: Deployment
) -> None:
    process, url = start(beside(tiny, "--drain-s", "100"))
    client = ready_client(url, tiny)
    response, lines = open_stream(client, 3000)
    process.signal(signal.SIGTERM)
    until(
        lambda: client.http.get("/ready").status_code == 503,
        lambda: "the router to drain",
        deadline_s=10,
    )
    refused = client.http.post("/v1/completions", json={"model": tiny.model, "prompt": "x"})
    assert refused.status_code == 503 and "retry-after" in refused.headers
    assert process.exit_code() is None
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    response.close()
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["choices"][0]["finish_reason"] == "length"
    client.close()
    assert process.wait() == 0


def test_the_deadline_of_draining_ends_streams_with_an_error(
    start: Callable[[Sequence[str]], tuple[Process, str]], tiny: Deployment
) -> None:
    process, url = start(beside(tiny, "--drain-s", "0"))
    client = ready_client(url, tiny)
    response, lines = open_stream(client, 3000)
    process.signal(signal.SIGTERM)
    rest = list(lines)
    response.close()
    assert "event: error" in rest
    assert "data: [DONE]" not in rest
    client.close()
    assert process.wait() == 0
    tiny.wait_idle()


def test_a_second_signal_ends_it_at_once(
    start: Callable[[Sequence[str]], tuple[Process, str]], tiny: Deployment
) -> None:
    process, url = start(beside(tiny))
    client = ready_client(url, tiny)
    response, _ = open_stream(client, 3000)
    process.signal(signal.SIGINT)
    until(
        lambda: client.http.get("/ready").status_code == 503,
        lambda: "the router to drain",
        deadline_s=10,
    )
    process.signal(signal.SIGINT)
    assert process.wait(deadline_s=5) == 130
    response.close()
    client.close()
    tiny.wait_idle()


def test_too_many_at_once_are_turned_away(
    start: Callable[[Sequence[str]], tuple[Process, str]], tiny: Deployment
) -> None:
    _, url = start(beside(tiny, "--max-concurrent-requests", "1"))
    client = ready_client(url, tiny)
    response, _ = open_stream(client, 3000)
    body = {"model": tiny.model, "prompt": "x", "max_tokens": 1}
    refused = client.http.post("/v1/completions", json=body)
    assert refused.status_code == 503 and "retry-after" in refused.headers
    assert "1 sequences are running" in refused.json()["error"]["message"]
    response.close()
    until(
        lambda: client.http.post("/v1/completions", json=body).status_code == 200,
        lambda: "room after the client hung up",
        deadline_s=10,
    )
    client.close()
