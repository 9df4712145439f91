"""Traces of a real router in front of real workers, as a collector gets them."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import httpx
import pytest
from support.deployment import Deployment
from support.processes import Process
from support.waiting import until

from tasuki import _native
from tasuki.errors import TasukiError
from tasuki.launch.config import ServeConfig
from tasuki.launch.router_options import RouterOptions
from tasuki.launch.serve import serve

DEADLINE_S = 30.0
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"

traced = pytest.mark.skipif(
    not _native.HAS_OTEL, reason="the extension has no traces: make setup FEATURES=otel"
)


class Collector(ThreadingHTTPServer):
    """Keeps what is posted; the Rust tests decode it."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.posts: list[tuple[str, str, bytes]] = []

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.posts.append((self.path, self.headers["content-type"], body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as server:
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join(DEADLINE_S)


def arguments(tiny: Deployment, *more: str) -> list[str]:
    words = ["--model", str(tiny.model_path), "--served-model-name", tiny.model]
    words += ["--port", "0", "--role-preference", "1000", "--readiness-grace-s", "0", *more]
    for worker in tiny.workers.values():
        words += ["--worker", f"127.0.0.1:{worker.port}"]
    return words


def ask(router: Process, url: str, flags: str) -> None:
    with httpx.Client(base_url=url, trust_env=False, timeout=60) as client:
        until(lambda: client.get("/ready").status_code == 200, router.tail, deadline_s=DEADLINE_S)
        body = {"prompt": "gong", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-{flags}"}
        assert client.post("/v1/completions", json=body, headers=headers).status_code == 200


def end(router: Process) -> str:
    router.signal(signal.SIGTERM)
    assert router.wait() == 0
    return router.output()


@traced
@pytest.mark.parametrize("sampled", [True, False])
def test_a_split_request_is_in_the_clients_trace(
    start: Callable[[Sequence[str]], tuple[Process, str]],
    tiny: Deployment,
    collector: Collector,
    sampled: bool,
) -> None:
    router, url = start(arguments(tiny, "--otlp-endpoint", collector.endpoint))
    ask(router, url, "01" if sampled else "00")
    end(router)
    if not sampled:
        assert not collector.posts
        return
    assert {(path, kind) for path, kind, _ in collector.posts} == {
        ("/v1/traces", "application/x-protobuf")
    }
    sent = b"".join(body for _, _, body in collector.posts)
    # Names and ids are in protobuf messages as they are.
    legs = (b"tasuki.prefill", b"tasuki.decode")
    phases = tuple(b"tasuki.worker." + name for name in (b"prefill", b"handoff", b"decode"))
    steps = (b"tasuki.tokenize", b"tasuki.queue", b"tasuki.placement")
    assert all(name in sent for name in (*legs, *phases, *steps, b"POST /v1/completions"))
    in_workers = re.findall(rb"tasuki\.worker\.(?:queue|prefill|handoff|transfer|decode)", sent)
    assert sent.count(bytes.fromhex(TRACE)) == 6 + len(in_workers)
    assert sent.count(bytes.fromhex(PARENT)) == 1
    assert b"tasuki.prefill_s" in sent and b"tasuki.transfer_bytes" in sent
    assert b"gong" not in sent


@traced
def test_a_collector_that_is_down_harms_no_request(
    start: Callable[[Sequence[str]], tuple[Process, str]], tiny: Deployment
) -> None:
    router, url = start(arguments(tiny, "--otlp-endpoint", "http://127.0.0.1:9"))
    ask(router, url, "01")
    dropped = r'tasuki_trace_spans_dropped_total{reason="export_failed"} ([0-9]+)'

    def lost() -> int:
        page = httpx.get(f"{url}/metrics", trust_env=False).text
        found = re.search(dropped, page)
        return int(found[1]) if found else 0

    until(lambda: lost() >= 9, router.tail, deadline_s=DEADLINE_S)
    assert "spans were dropped" in end(router)


@pytest.mark.system
@pytest.mark.skipif(_native.HAS_OTEL, reason="the extension has traces")
def test_a_build_without_traces_names_the_feature(tmp_path: Path, tiny_model: Path) -> None:
    words = ["router", "--port", "0", "--model", str(tiny_model), "--worker", "127.0.0.1:1"]
    words += ["--otlp-endpoint", "http://127.0.0.1:4318"]
    router = Process("router", words, tmp_path / "router.log")
    router.start()
    assert router.wait(deadline_s=DEADLINE_S) == 1
    assert "--otlp-endpoint requires the feature `otel`" in router.output()
    config = ServeConfig(model="m", router=RouterOptions(otlp_endpoint="http://127.0.0.1:4318"))
    with pytest.raises(TasukiError, match="--otlp-endpoint requires the feature `otel`"):
        serve(config)
