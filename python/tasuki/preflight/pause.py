"""`tasuki worker --pause`: the worker waits before it loads anything, until told to go on.

    GET  /      the checks, as JSON
    POST /exit  the worker goes on

So operators run longer tests of the machine (linkbench, nccl-tests) in the worker's own
container. On an address that is no loopback address both require a token, as
`Authorization: Bearer TOKEN`.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import logging
import os
import secrets
import socket
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tasuki.preflight.result import Check, PreflightError, as_json

log = logging.getLogger(__name__)

TOKEN_VARIABLE = "TASUKI_PAUSE_TOKEN"
_REQUEST_S = 10.0


def hold(checks: Sequence[Check], host: str = "127.0.0.1", port: int = 0) -> None:
    """Answer HTTP until `POST /exit`.

    Args:
        checks: What GET shows.
        host: Address to bind.
        port: 0: any free one; the log says which.

    Raises:
        PreflightError: The address cannot be had.
    """
    token = "" if _is_loopback(host) else os.environ.get(TOKEN_VARIABLE) or _new_token()
    try:
        server = Pause((host, port), checks, token)
    except OSError as error:
        raise PreflightError(
            f"--pause cannot listen on {host}:{port} ({error}): choose another --pause-host or"
            " --pause-port"
        ) from error
    with server:
        name = f"[{host}]" if ":" in host else host
        where = f"http://{name}:{server.server_address[1]}"
        bearer = f" -H 'Authorization: Bearer ${TOKEN_VARIABLE}'" if token else ""
        log.warning("paused: `curl%s -X POST %s/exit` lets this worker go on", bearer, where)
        threading.Thread(target=server.serve_forever, name="pause", daemon=True).start()
        server.ended.wait()
        server.shutdown()
    log.info("the pause is over")


class Pause(ThreadingHTTPServer):
    """The server of one pause; `ended` is set by `POST /exit`."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], checks: Sequence[Check], token: str) -> None:
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        self.ended = threading.Event()
        self.page = as_json(checks).encode()
        self.token = token
        super().__init__(address, _Handler)


class _Handler(BaseHTTPRequestHandler):
    server: Pause
    timeout = _REQUEST_S

    def do_GET(self) -> None:
        if self._may():
            self._answer(200 if self.path == "/" else 404, self.server.page)

    def do_POST(self) -> None:
        if not self._may():
            return
        if self.path != "/exit":
            self._answer(404, b"{}")
            return
        self._answer(200, json.dumps({"paused": False}).encode())
        self.server.ended.set()

    def _may(self) -> bool:
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if not self.server.token or hmac.compare_digest(given.encode(), self.server.token.encode()):
            return True
        self._answer(401, b"{}")
        return False

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        log.info("pause: " + format, *args)


def _new_token() -> str:
    token = secrets.token_urlsafe(24)
    log.warning("%s is not set; this pause's token is %s", TOKEN_VARIABLE, token)
    return token


def _is_loopback(host: str) -> bool:
    try:
        address = host if ":" in host else socket.gethostbyname(host)
        return ipaddress.ip_address(address).is_loopback
    except (OSError, ValueError):
        return False
