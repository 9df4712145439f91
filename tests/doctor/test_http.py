"""Questions over HTTP to servers of their own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tasuki.doctor.http import Http


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
