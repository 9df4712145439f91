"""A client of the Kubernetes API, as small as these tests need it."""

from __future__ import annotations

import json
import ssl
import urllib.error
import urllib.request
from typing import Any

Object = dict[str, Any]

JSON = "application/json"
MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"


class ApiError(Exception):
    """The API server refused.

    Attributes:
        code: HTTP status; 0: it is not in reach.
    """

    def __init__(self, code: int, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


class Api:
    """Requests with one token; the server's certificate is that of the test's own server."""

    def __init__(self, url: str, token: str) -> None:
        self._url = url
        self._token = token
        self._context = ssl._create_unverified_context()

    def get(self, path: str) -> Object:
        return self.call("GET", path)

    def post(self, path: str, body: Object) -> Object:
        return self.call("POST", path, body)

    def patch(self, path: str, body: Object, kind: str = STRATEGIC) -> Object:
        return self.call("PATCH", path, body, kind)

    def delete(self, path: str, body: Object | None = None) -> Object:
        return self.call("DELETE", path, body)

    def check_ready(self) -> None:
        """Ask whether the server has all that its clients wait for, the first roles among them.

        Raises:
            ApiError: It has not.
        """
        self._send("GET", "/readyz", None, JSON)

    def call(self, method: str, path: str, body: Object | None = None, kind: str = JSON) -> Object:
        """One request.

        Raises:
            ApiError: It failed.
        """
        found: Object = json.loads(self._send(method, path, body, kind) or b"{}")
        return found

    def _send(self, method: str, path: str, body: Object | None, kind: str) -> bytes:
        request = urllib.request.Request(
            self._url + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {self._token}", "Content-Type": kind},
        )
        try:
            with urllib.request.urlopen(request, context=self._context, timeout=20) as answer:
                content: bytes = answer.read()
                return content
        except urllib.error.HTTPError as error:
            message = error.read().decode(errors="replace")[:500]
            raise ApiError(error.code, message) from error
        except OSError as error:
            raise ApiError(0, str(error)) from error
