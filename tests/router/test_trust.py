"""What the router believes of clients, and what it tells about them and about workers."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import pytest
from support.deployment import Deployment
from support.processes import Process
from support.waiting import until

SECRET = "sesame"
# What proxies, gateways and other routers say to those behind them.
INTERNAL_HEADERS = (
    "x-request-id",
    "x-forwarded-for",
    "x-forwarded-host",
    "x-real-ip",
    "forwarded",
    "x-tenant",
    "x-user-id",
    "x-prefill-host-port",
    "x-prefiller-host-port",
    "x-decode-host-port",
    "x-gateway-destination-endpoint",
    "x-worker",
    "x-worker-id",
    "x-engine-id",
    "x-model-identity",
    "x-data-parallel-rank",
    "x-priority",
)
STRANGER = "127.0.0.1:9"
NAMES_OF_WORKERS: tuple[tuple[str, Any], ...] = (
    ("worker", STRANGER),
    ("worker_url", f"http://{STRANGER}"),
    ("workers", [STRANGER]),
    ("kv_endpoint", STRANGER),
    ("engine_id", "e"),
    ("peer", {"kv_endpoint": STRANGER}),
    ("kv_transfer_params", {"do_remote_prefill": True, "remote_host": "127.0.0.1"}),
    ("bootstrap_host", "127.0.0.1"),
    ("bootstrap_port", 9),
    ("bootstrap_room", 1),
    ("data_parallel_rank", 0),
)


@pytest.fixture
def beside(
    start: Callable[[Sequence[str]], tuple[Process, str]], tiny: Deployment
) -> tuple[Process, httpx.Client]:
    """A router that logs everything and requires a key, in front of the workers of `tiny`."""
    arguments = ["--model", str(tiny.model_path), "--served-model-name", tiny.model]
    arguments += ["--port", "0", "--log", "trace", "--role-preference", "1000"]
    for worker in tiny.workers.values():
        arguments += ["--worker", f"127.0.0.1:{worker.port}"]
    router, url = start(arguments)
    client = httpx.Client(base_url=url, trust_env=False, timeout=60)
    ready = lambda: client.get("/ready").status_code == 200  # noqa: E731
    until(ready, router.tail, deadline_s=30)
    return router, client


def body(tiny: Deployment, **more: Any) -> dict[str, Any]:
    return {"model": tiny.model, "prompt": "gong", "max_tokens": 4, "temperature": 0, **more}


def test_no_header_of_a_client_is_in_a_log(
    beside: tuple[Process, httpx.Client], tiny: Deployment
) -> None:
    router, client = beside
    names = ("authorization", "proxy-authorization", "cookie", "x-api-key", *INTERNAL_HEADERS)
    headers = {name: f"{SECRET} {name}" for name in names}
    for path, sent in (
        ("/v1/completions", body(tiny)),
        ("/v1/completions", body(tiny, stream=True)),
        ("/v1/completions", body(tiny, max_tokens=-1)),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "gong"}]}),
        ("/tokenize", {"prompt": "gong"}),
        ("/nowhere", {}),
    ):
        client.post(path, json=sent, headers=headers)
    ended = lambda: router.output().count("request ended") >= 3  # noqa: E731
    until(ended, router.tail, deadline_s=30)
    assert " TRACE " in router.output()
    assert SECRET not in router.output()


def test_no_internal_header_is_believed(
    beside: tuple[Process, httpx.Client], tiny: Deployment
) -> None:
    _, client = beside
    headers = dict.fromkeys(INTERNAL_HEADERS, STRANGER)
    plain = client.post("/v1/completions", json=body(tiny, timings=True))
    said = client.post("/v1/completions", json=body(tiny, timings=True), headers=headers)
    assert said.status_code == plain.status_code == 200
    assert said.json()["choices"] == plain.json()["choices"]
    assert STRANGER not in said.text + str(said.headers)
    placed = ("prefill_worker", "decode_worker")
    assert [said.json()["timings"][leg] for leg in placed] == ["0", "1"]
    assert said.headers["x-request-id"] not in (STRANGER, plain.headers["x-request-id"])


@pytest.mark.parametrize(("field", "value"), NAMES_OF_WORKERS)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_no_client_names_a_worker(tiny: Deployment, path: str, field: str, value: Any) -> None:
    sent = body(tiny) | {field: value}
    if "chat" in path:
        sent = {**sent, "messages": [{"role": "user", "content": "gong"}]}
        del sent["prompt"]
    answer = tiny.http.http.post(path, json=sent)
    assert answer.status_code == 400, answer.text
    assert field in answer.json()["error"]["message"]


def test_no_answer_has_an_address_or_an_engine(
    beside: tuple[Process, httpx.Client], tiny: Deployment
) -> None:
    router, client = beside
    engines = set(re.findall(r"engine=\"?([0-9a-f]{32})", router.output()))
    assert len(engines) == 2, router.tail()
    ports = {str(worker.port) for worker in tiny.workers.values()}
    hidden = re.compile("|".join(["127\\.0\\.0\\.1", *engines, *(rf"\b{p}\b" for p in ports)]))
    chat = {"model": tiny.model, "messages": [{"role": "user", "content": "gong"}]}
    answers = [
        client.get("/v1/models"),
        client.post("/v1/completions", json=body(tiny, timings=True)),
        client.post("/v1/completions", json=body(tiny, stream=True, timings=True)),
        client.post("/v1/chat/completions", json=chat | {"max_tokens": 3, "n": 2}),
        client.post("/v1/completions", json=body(tiny, model="nobody")),
        client.post("/v1/completions", json=body(tiny, max_tokens=10**9)),
    ]
    for answer in answers:
        text = f"{answer.headers}\n{answer.text}"
        assert not hidden.search(text), text
        for name in re.findall(r'"id":\s*"([^"]*)"', answer.text):
            assert re.fullmatch(r"(chatcmpl|cmpl)-[0-9a-f]{32}|test-model", name), name
