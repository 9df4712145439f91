"""A plain HTTP client of the router that keeps token ids and times.

The official `openai` client is exercised by its own tests; here every byte of
the answer matters, so nothing is hidden behind a library's types.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

TIMEOUT_S = 120.0


class AnswerError(Exception):
    """The router answered with an error, or ended a stream with one."""

    def __init__(self, status: int, body: Any) -> None:
        super().__init__(f"{status}: {body}")
        self.status = status
        self.body = body

    @property
    def message(self) -> str:
        return str(self.body["error"]["message"])


@dataclass
class Answer:
    """One choice of one answer.

    Attributes:
        arrivals_s: for streams, `time.perf_counter()` of every token.
    """

    prompt_tokens: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    timings: dict[str, Any] | None = None
    arrivals_s: list[float] = field(default_factory=list)
    sent_s: float = 0.0


def request_body(prompt: str | list[int] | tuple[dict[str, str], ...], **options: Any) -> Any:
    """Path and body of a greedy request that ignores EOS, unless told otherwise."""
    body: dict[str, Any] = {
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **options,
    }
    if isinstance(prompt, tuple):
        return "/v1/chat/completions", {"messages": list(prompt), **body}
    return "/v1/completions", {"prompt": prompt, **body}


class Client:
    """Talks to one router. Safe to use from many threads.

    Args:
        url: of the router, without `/v1`.
        model: name to ask for.
    """

    def __init__(self, url: str, model: str) -> None:
        self.url = url
        self.model = model
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        # Plain HTTP: without `verify` no certificates are loaded, which takes 20 ms a client.
        self.http = httpx.Client(
            base_url=url, timeout=TIMEOUT_S, limits=limits, trust_env=False, verify=False
        )

    def close(self) -> None:
        self.http.close()

    def post(self, path: str, body: Any) -> Any:
        """The JSON of a successful answer.

        Raises:
            AnswerError: the status is not 200.
        """
        response = self.http.post(path, json=body)
        if response.status_code != 200:
            raise AnswerError(response.status_code, response.json())
        return response.json()

    def complete(
        self, prompt: str | list[int] | tuple[dict[str, str], ...], **options: Any
    ) -> Answer:
        """One answer, not streamed."""
        path, body = request_body(prompt, timings=True, **options)
        document = self.post(path, {"model": self.model, **body})
        choice = document["choices"][0]
        return Answer(
            prompt_tokens=choice.get("prompt_token_ids") or document.get("prompt_token_ids") or [],
            tokens=choice["token_ids"],
            text=choice["text"] if "text" in choice else choice["message"]["content"],
            finish_reason=choice["finish_reason"],
            usage=document["usage"],
            timings=document.get("timings"),
        )

    def stream(
        self,
        prompt: str | list[int] | tuple[dict[str, str], ...],
        *,
        on_token: Callable[[Answer], None] | None = None,
        **options: Any,
    ) -> Answer:
        """One answer, streamed to its end.

        Args:
            on_token: called after each chunk that brought tokens; may raise to
                hang up in mid-stream.

        Raises:
            AnswerError: an error status, or an error event in the stream.
            httpx.RemoteProtocolError: the stream broke off.
            AssertionError: the stream ended without `[DONE]`.
        """
        path, body = request_body(prompt, **options)
        body |= {"model": self.model, "stream": True, "stream_options": {"include_usage": True}}
        answer = Answer(sent_s=time.perf_counter())
        done = False
        for event in self.events(path, body):
            assert not done, f"an event after [DONE]: {event}"
            if event == "[DONE]":
                done = True
                continue
            _take_chunk(answer, json.loads(event), on_token)
        assert done, f"stream ended without [DONE] after {len(answer.tokens)} tokens"
        return answer

    def events(self, path: str, body: Any) -> Iterator[str]:
        """The data of each server-sent event."""
        with self.http.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                response.read()
                raise AnswerError(response.status_code, response.json())
            for line in response.iter_lines():
                if line.startswith("data:"):
                    yield line.removeprefix("data:").strip()


def _take_chunk(
    answer: Answer, chunk: dict[str, Any], on_token: Callable[[Answer], None] | None
) -> None:
    if "error" in chunk:
        raise AnswerError(200, chunk)
    if chunk.get("usage"):
        answer.usage = chunk["usage"]
    if chunk.get("timings"):
        answer.timings = chunk["timings"]
    answer.prompt_tokens = chunk.get("prompt_token_ids") or answer.prompt_tokens
    for choice in chunk["choices"]:
        answer.prompt_tokens = choice.get("prompt_token_ids") or answer.prompt_tokens
        answer.text += choice.get("text") or choice.get("delta", {}).get("content") or ""
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
        if tokens := choice.get("token_ids"):
            answer.tokens += tokens
            answer.arrivals_s += [time.perf_counter()] * len(tokens)
            if on_token is not None:
                on_token(answer)
