"""A router that does not become ready: the launcher's error has the router's own words."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasuki.launch import serve
from tasuki.launch.config import ServeConfig
from tasuki.launch.errors import LaunchError
from tasuki.launch.supervisor import Supervisor

NO_WORKER = b'{"error": {"message": "no decode worker is up and roles are strict"}}'


@pytest.fixture
def router() -> Iterator[http.server.ThreadingHTTPServer]:
    """Answers /ready with its `answer`."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = self.server.answer  # type: ignore[attr-defined]
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield made
    made.shutdown()
    made.server_close()


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ((503, NO_WORKER), "answers 503: no decode worker is up and roles are strict"),
        ((502, b"a proxy's words\n"), "answers 502: a proxy's words"),
    ],
)
def test_the_error_has_the_answer_of_ready(
    router: http.server.ThreadingHTTPServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    answer: tuple[int, bytes],
    says: str,
) -> None:
    router.answer = answer  # type: ignore[attr-defined]
    url = f"http://127.0.0.1:{router.server_port}"
    monkeypatch.setattr(serve, "_HEALTH_TIMEOUT_S", 0.0)
    monkeypatch.setattr(Supervisor, "await_ready", lambda *_: [url])
    with pytest.raises(LaunchError) as late:
        serve._await_router(ServeConfig(model="m"), Supervisor(tmp_path, echo=False))
    assert str(late.value).startswith(f"the router at {url} is not ready (/ready {says})")
    router.answer = 200, b"{}"  # type: ignore[attr-defined]
    assert serve._await_router(ServeConfig(model="m"), Supervisor(tmp_path, echo=False)) == url
