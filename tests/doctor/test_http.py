"""Questions over HTTP to servers of their own."""

from __future__ import annotations

import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from support.certificates import Authority

from tasuki.doctor.http import Answer, Http, LateError, NoAnswerError
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


@pytest.mark.system
def test_a_certificate_that_is_not_trusted_names_the_variable(tmp_path: Path) -> None:
    made = Authority(tmp_path / "ca").fleet("web")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made.cert, made.key)

    class Server(ThreadingHTTPServer):
        def get_request(self) -> tuple[Any, Any]:
            plain, address = super().get_request()
            return context.wrap_socket(plain, server_side=True), address

    with Server(("127.0.0.1", 0), BaseHTTPRequestHandler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        asked = Http(f"https://127.0.0.1:{running.server_port}", timeout_s=5.0)
        with pytest.raises(NoAnswerError, match=r"certificate verify failed.*SSL_CERT_FILE"):
            asked.get("/metrics")
        running.shutdown()


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


@contextmanager
def dripping(beginning: str, end: str) -> Iterator[str]:
    """A server that sends a second of single bytes between the two, and closes."""
    over = threading.Event()

    def serve() -> None:
        connection, _ = listener.accept()
        with connection, suppress(OSError):
            connection.recv(1 << 16)
            connection.sendall(beginning.encode())
            for _ in range(50):
                over.wait(0.02)
                connection.sendall(b"x")
            connection.sendall(end.encode())

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        over.set()
        thread.join(60)


@pytest.mark.parametrize(
    ("beginning", "end"),
    [
        ("HTTP/1.1 200 OK\r\nX: ", "\r\n\r\n" + 3 * "data: {}\n"),
        ("HTTP/1.1 200 OK\r\n\r\n", "\n" + 3 * "data: {}\n"),
        ("HTTP/1.1 500 no\r\n\r\n", ""),
    ],
    ids=["head", "body", "error"],
)
def test_the_limit_is_that_of_a_whole_answer(beginning: str, end: str) -> None:
    with (
        dripping(beginning, end) as url,
        pytest.raises(NoAnswerError, match=r"no answer within 0\.3 s \(--timeout-s\)"),
    ):
        Http(url, timeout_s=0.3).get("/metrics")
    with dripping(beginning, end) as url, pytest.raises(LateError, match=r"within 0\.3 s"):
        Http(url, timeout_s=0.3).timed("/v1/completions", {}, 1)


def test_an_error_that_never_ends_is_no_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=_begin_an_error, args=(listener,), daemon=True).start()
        with pytest.raises(NoAnswerError, match=r"no answer within 0\.3 s \(--timeout-s\)"):
            Http(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout_s=0.3).get("/metrics")


def _begin_an_error(listener: socket.socket) -> None:
    connection, _ = listener.accept()
    with connection, suppress(OSError):
        connection.sendall(b"HTTP/1.1 500 no\r\nContent-Length: 9\r\n\r\n")
        while connection.recv(1 << 16):  # until the client leaves
            pass
