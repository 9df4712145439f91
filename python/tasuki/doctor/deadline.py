"""HTTP with a limit of time for the whole of an answer, however slowly its parts come."""

from __future__ import annotations

import io
import socket
import time
import urllib.error
import urllib.request
from functools import partial
from http.client import HTTPConnection, HTTPResponse, HTTPSConnection
from typing import Any


def ask(request: urllib.request.Request, timeout_s: float) -> Any:
    """The answer, of any status, to be closed; reading it raises `TimeoutError` after the limit.

    Raises:
        OSError: There is none.
        HTTPException: It is no HTTP.
    """
    opener = urllib.request.build_opener(_Plain, _Secure)
    try:
        return opener.open(request, timeout=timeout_s)
    except urllib.error.HTTPError as error:
        return error


class _Parts(io.RawIOBase):
    """What a socket receives until a time of `time.monotonic`."""

    def __init__(self, connection: socket.socket, until_s: float) -> None:
        self._connection, self._until_s = connection, until_s
        self._parts = connection.makefile("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left_s = self._until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("timed out")
        self._connection.settimeout(left_s)
        return self._parts.readinto(buffer)

    def close(self) -> None:
        self._parts.close()
        super().close()


class _Response(HTTPResponse):
    def __init__(self, sock: socket.socket, *more: Any, until_s: float, **named: Any) -> None:
        super().__init__(sock, *more, **named)
        self.fp.close()
        self.fp = io.BufferedReader(_Parts(sock, until_s))


def _limited(kind: Any, host: str, *, timeout: float, **named: Any) -> Any:
    made = kind(host, timeout=timeout, **named)
    made.response_class = partial(_Response, until_s=time.monotonic() + timeout)
    return made


class _Plain(urllib.request.HTTPHandler):
    def http_open(self, request: urllib.request.Request) -> Any:
        return self.do_open(partial(_limited, HTTPConnection), request)


class _Secure(urllib.request.HTTPSHandler):
    def https_open(self, request: urllib.request.Request) -> Any:
        return self.do_open(partial(_limited, HTTPSConnection), request)
