"""HTTP servers that show what a test says."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODELS = {"data": [{"id": "m", "root": "/models/m", "max_model_len": 2048}]}
ROUTER = """# TYPE tasuki_worker_up gauge
tasuki_worker_up{{worker="0",role="prefill",model="m"}} {first}
tasuki_worker_up{{worker="1",role="decode",model="m"}} 1
tasuki_worker_free_blocks{{worker="0",role="prefill",model="m"}} 10
tasuki_worker_total_blocks{{worker="0",role="prefill",model="m"}} 100
"""


@contextmanager
def server(*metrics: str, **answers: Any) -> Iterator[str]:
    """A server that shows these metrics one after the other, the last again and again.

    Args:
        metrics: Texts of `/metrics`; none: 404.
        answers: JSON by path, with `_` for `/`.
    """
    left = list(metrics)
    paths = {"/" + path.replace("__", "/"): answer for path, answer in answers.items()}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/metrics" and left:
                body = (left.pop(0) if len(left) > 1 else left[0]).encode()
            elif self.path in paths:
                body = json.dumps(paths[self.path]).encode()
            else:
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()
