"""The demo against a server that streams what the router would."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator

import pytest

from tasuki.launch.demo import ask, report
from tasuki.launch.errors import LaunchError
from tasuki.launch.serve import Deployment

TIMINGS = {
    "queue_ms": 1.5,
    "prefill_ms": 80.25,
    "transfer_bytes": 2_500_000,
    "prefill_worker": "p0",
    "decode_worker": "d0",
}
USAGE = {"prompt_tokens": 40, "completion_tokens": 2}


def chunk(text: str | None = None, **more: object) -> dict[str, object]:
    choices = [] if text is None else [{"index": 0, "delta": {"content": text}}]
    return {"choices": choices, **more}


@pytest.fixture
def server() -> Iterator[http.server.ThreadingHTTPServer]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert body["stream_options"] == {"include_usage": True}
            self.send_response(self.server.status)  # type: ignore[attr-defined]
            self.end_headers()
            for each in self.server.chunks:  # type: ignore[attr-defined]
                self.wfile.write(f"data: {json.dumps(each)}\n\n".encode())
            self.wfile.write(b"data: [DONE]\n\n")

        def log_message(self, *_: object) -> None:
            pass

    made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.status = 200  # type: ignore[attr-defined]
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield made
    made.shutdown()
    made.server_close()


def deployment(server: http.server.ThreadingHTTPServer) -> Deployment:
    return Deployment(f"http://127.0.0.1:{server.server_port}", "m", "1 prefill + 1 decode")


def test_the_answer_is_streamed_and_accounted_for(
    server: http.server.ThreadingHTTPServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.chunks = [  # type: ignore[attr-defined]
        chunk("Pa"),
        chunk("ris — 東京"),
        chunk(usage=USAGE, timings=TIMINGS),
    ]
    assert ask(deployment(server), "Where?") == 0
    shown = capsys.readouterr().out
    assert "> Where?" in shown
    assert "Paris — 東京" in shown
    assert "80.2" in shown
    assert "2.50 MB, from worker p0 to d0" in shown
    assert "prompt 40 tokens, answer 2 tokens" in shown


@pytest.mark.parametrize(
    ("status", "chunks", "message"),
    [
        (200, [chunk("Pa"), {"error": {"message": "all workers left"}}], "all workers left"),
        (503, [], "HTTP 503"),
        (200, [chunk("Pa")], "no timings"),
    ],
)
def test_an_error_is_not_taken_for_an_answer(
    server: http.server.ThreadingHTTPServer, status: int, chunks: list[object], message: str
) -> None:
    server.status = status  # type: ignore[attr-defined]
    server.chunks = chunks  # type: ignore[attr-defined]
    with pytest.raises(LaunchError, match=message):
        ask(deployment(server))


HANDOFF_ROWS = ("handshake", "transfer", "exposed", "messages")


def test_a_colocated_answer_has_no_rows_for_the_handoff() -> None:
    table = report(USAGE, {**TIMINGS, "transfer_bytes": 0, "decode_worker": "p0"}, [0.1])
    assert "prefill and decode ran on one worker" in table
    assert not [row for row in HANDOFF_ROWS if row in table]
    assert "on the worker" in table


def test_a_split_answer_has_them_even_if_nothing_moved() -> None:
    table = report(USAGE, {**TIMINGS, "transfer_bytes": 0}, [0.1])
    assert "KV moved: none" in table
    assert "one worker" not in table
    assert [row for row in HANDOFF_ROWS if row in table] == list(HANDOFF_ROWS)
