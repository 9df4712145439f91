"""Questions over HTTP, with an API key if there is one. Only reads, and requests for tokens."""

from __future__ import annotations

import http.client
import json
import ssl
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tasuki.doctor.deadline import ask
from tasuki.doctor.picture import Probe

_LARGEST_BYTES = 64 << 20


class NoAnswerError(Exception):
    """Why a server did not answer as it should; one line."""


class FailedError(NoAnswerError):
    """A request that failed by the server's fault."""


class LateError(NoAnswerError):
    """A request that was not answered in time: by the server's fault, unless it has a queue."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__(f"no answer within {timeout_s:g} s (--timeout-s)")


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer, whatever its status."""

    status: int
    content_type: str
    body: str

    def json(self) -> Any:
        """The body as JSON.

        Raises:
            NoAnswerError: It is none.
        """
        try:
            return json.loads(self.body)
        except ValueError as error:
            raise NoAnswerError(f"status {self.status} without JSON: {self.body[:80]!r}") from error

    def object(self, name: str) -> Mapping[str, Any]:
        """An object in the body's JSON object; empty where it has none.

        Raises:
            NoAnswerError: The body is other JSON, or none.
        """
        found = self.json()
        found = found.get(name) or {} if isinstance(found, dict) else None
        if not isinstance(found, dict):
            raise NoAnswerError(
                f"status {self.status} without an object {name!r} in its JSON: {self.body[:80]!r}"
            )
        return found


@dataclass(frozen=True, slots=True)
class Http:
    """One server.

    Attributes:
        base: URL without a slash at the end.
        key: For the Authorization header; empty: none is sent.
        timeout_s: For each answer.
    """

    base: str
    key: str = ""
    timeout_s: float = 10.0

    def get(self, path: str) -> Answer:
        """GET; an error status is an answer.

        Raises:
            NoAnswerError: There is none.
        """
        return self._ask(self._request(path))

    def post(self, path: str, body: Mapping[str, Any]) -> Answer:
        """POST of JSON; an error status is an answer.

        Raises:
            NoAnswerError: There is none.
        """
        return self._ask(self._request(path, body))

    def timed(self, path: str, body: Mapping[str, Any], round_: int) -> Probe:
        """A streamed completion and how quickly its tokens came.

        Raises:
            FailedError: It failed by the server's fault.
            LateError: It took too long.
            NoAnswerError: It was refused, or had fewer than two tokens.
        """
        began, times = time.monotonic(), []
        try:
            request = self._request(path, {**body, "stream": True})
            with ask(request, self.timeout_s) as answer:
                if answer.status >= 300:
                    raise not_answered(answer.status, _answer(answer).body)
                for line in answer:
                    if line.startswith(b"data: {"):
                        if b'"error"' in line[:20]:
                            raise FailedError(line.decode(errors="replace").strip()[:200])
                        times.append(time.monotonic())
        except (OSError, http.client.HTTPException) as error:
            if isinstance(getattr(error, "reason", error), TimeoutError):
                raise LateError(self.timeout_s) from error
            raise FailedError(self._said(error)) from error
        if len(times) < 3:
            raise NoAnswerError(
                f"an answer of {len(times)} events, where 3 are needed for its pace"
            )
        return Probe(round_, times[0] - began, (times[-1] - times[0]) / (len(times) - 1))

    def _request(self, path: str, body: Mapping[str, Any] | None = None) -> urllib.request.Request:
        request = urllib.request.Request(self.base + path)
        if body is not None:
            request.data = json.dumps(body).encode()
            request.add_header("Content-Type", "application/json")
        if self.key:  # for this server alone, not for one that it redirects to
            request.add_unredirected_header("Authorization", f"Bearer {self.key}")
        return request

    def _ask(self, request: urllib.request.Request) -> Answer:
        try:
            with ask(request, self.timeout_s) as answer:
                return _answer(answer)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise NoAnswerError(self._said(error)) from error

    def _said(self, error: BaseException) -> str:
        reason = getattr(error, "reason", error)
        if isinstance(reason, TimeoutError):
            return str(LateError(self.timeout_s))
        if isinstance(reason, ssl.SSLCertVerificationError):
            return f"{reason}; SSL_CERT_FILE names a CA that the system does not know"
        return str(reason) or type(reason).__name__


def _answer(response: Any) -> Answer:
    body = response.read(_LARGEST_BYTES).decode(errors="replace")
    return Answer(response.status, response.headers.get("content-type", ""), body)


def not_answered(status: int, body: str) -> NoAnswerError:
    """What an error status comes to: 503 is the answer to too much load, 4xx are our fault."""
    kind = FailedError if status >= 500 and status != 503 else NoAnswerError
    return kind(f"status {status}: {' '.join(body.split())[:160]}")
