"""Questions over HTTP to servers of their own."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tasuki.doctor.http import Answer, Http, NoAnswerError
from tasuki.doctor.picture import Pair, Router, Worker
from tasuki.doctor.probes import Plan, repeat, split
from tasuki.doctor.servers import EngineServer


@contextmanager
def server(location: str = "") -> Iterator[tuple[str, list[str]]]:
    """A server and the API keys that it saw; with a location it sends everyone there."""
    keys: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            keys.append(self.headers.get("Authorization", ""))
            self.send_response(307 if location else 200)
            if location:
                self.send_header("Location", location + self.path)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}", keys
        running.shutdown()


def test_a_key_does_not_follow_to_another_server() -> None:
    with server() as (there, seen), server(location=there) as (here, own):
        answer = Http(here, "sk-secret", timeout_s=5.0).get("/v1/models")
    assert (answer.status, answer.body) == (200, "{}")
    assert own == ["Bearer sk-secret"]
    assert seen == [""]


@contextmanager
def breaking_off(head: str) -> Iterator[Http]:
    """A server that answers with this head and resets the connection in the middle of the body."""

    def serve() -> None:
        client, _ = listener.accept()
        with client:
            client.recv(65536)
            client.sendall(head.encode() + b"oops")
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield Http(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout_s=5.0)
        thread.join(5.0)


@pytest.mark.parametrize("ask", [lambda http: http.get("/v1"), lambda http: http.timed("/", {}, 1)])
@pytest.mark.parametrize("size", ["Content-Length: 100", "Transfer-Encoding: chunked"])
def test_an_error_that_breaks_off_ends_in_no_traceback(
    ask: Callable[[Http], Any], size: str
) -> None:
    with breaking_off(f"HTTP/1.1 500 no\r\n{size}\r\n\r\n") as http:
        try:
            assert ask(http).status == 500
        except NoAnswerError as error:
            assert str(error)


@pytest.mark.parametrize("body", ["[]", "1", '{"usage": [1]}'])
def test_an_answer_of_other_json_ends_in_no_traceback(
    body: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Http, "post", lambda *_: Answer(200, "application/json", body))
    http = Http("http://a:1")
    router = Router("r", "other")
    repeat(router, http, "run", Plan(), lambda: True)
    assert "without an object 'usage'" in router.repeat_error
    prefill, decode = (EngineServer(http, Worker(name, "vllm")) for name in "pd")
    pair = Pair(prefill.worker, decode.worker)
    split(pair, prefill, decode, "run")
    assert pair.probe_error or pair.probe_fault
