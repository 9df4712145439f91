"""One chat answer streamed to the terminal, then where its time went."""

from __future__ import annotations

import http.client
import json
import sys
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from tasuki.launch.errors import LaunchError
from tasuki.launch.serve import Deployment

QUESTION = "What is the capital of France, and what is it known for?"
_ANSWER_TOKENS = 96
_TIMEOUT_S = 120.0

_SPLIT_PHASES = (
    ("queue", "queue_ms", "from the router to the first step on the prefill worker"),
    ("prefill", "prefill_ms", "the prompt's KV cache is computed"),
    ("first token", "first_token_ms", "all of it until the first token, at the router"),
    ("handshake", "handshake_ms", "the two workers get to know each other"),
    ("transfer", "transfer_ms", "the KV moves to the decode worker"),
    ("  exposed", "transfer_exposed_ms", "from the end of prefill until decode may be scheduled"),
    ("first decode", "first_decode_ms", "from then to the second token"),
    ("messages", "messages_ms", "what else lies between the first two tokens, at the router"),
    ("decode", "decode_ms", "from the second token to the last"),
    ("total", "total_ms", "received to done"),
)
_COLOCATED_PHASES = (
    ("queue", "queue_ms", "from the router to the first step on the worker"),
    ("prefill", "prefill_ms", "the prompt's KV cache is computed"),
    ("first token", "first_token_ms", "all of it until the first token, at the router"),
    ("first decode", "first_decode_ms", "from prefill's end to the second token"),
    ("decode", "decode_ms", "from the second token to the last"),
    ("total", "total_ms", "received to done"),
)


def ask(deployment: Deployment, question: str = QUESTION) -> int:
    """Ask one question, stream the answer to stdout, show the timings.

    Args:
        deployment: Whom to ask.
        question: What.

    Returns:
        0.

    Raises:
        LaunchError: The answer was an error, or had no timings.
        OSError: The router cannot be reached.
    """
    print(f"\n{deployment.model} at {deployment.url}\n{deployment.summary}")
    print(f"\n> {question}\n")
    begun_s = time.monotonic()
    token_times_s: list[float] = []
    usage: dict[str, Any] = {}
    timings: dict[str, Any] = {}
    for chunk in _stream(deployment, question):
        if "error" in chunk:
            raise LaunchError(f"the server answered: {chunk['error'].get('message')}")
        for choice in chunk.get("choices", []):
            if text := choice["delta"].get("content"):
                token_times_s.append(time.monotonic() - begun_s)
                sys.stdout.write(text)
                sys.stdout.flush()
        usage = chunk.get("usage") or usage
        timings = chunk.get("timings") or timings
    if not timings or not token_times_s:
        raise LaunchError("the answer carried no text or no timings")
    print("\n\n" + report(usage, timings, token_times_s) + "\n", flush=True)
    return 0


def report(usage: dict[str, Any], timings: dict[str, Any], token_times_s: list[float]) -> str:
    """The table under the answer; a colocated request has no rows for the handoff.

    Args:
        usage: OpenAI's `usage` object.
        timings: The router's `timings` object of the same chunk.
        token_times_s: When each piece of text arrived, since the request.
    """
    lines = ["where the time went        ms"]
    moved_bytes = timings.get("transfer_bytes", 0)
    source, target = timings.get("prefill_worker"), timings.get("decode_worker")
    colocated = not moved_bytes and source == target
    for label, key, meaning in _COLOCATED_PHASES if colocated else _SPLIT_PHASES:
        lines.append(f"  {label:<16}{timings.get(key, 0.0):>10.1f}   {meaning}")
    prompt, answer = usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)
    lines.append(f"prompt {prompt} tokens, answer {answer} tokens")
    first_ms = 1e3 * token_times_s[0]
    line = f"time to first token {first_ms:.0f} ms"
    if len(token_times_s) > 1:
        line += f", to second {1e3 * token_times_s[1]:.0f} ms"
        rate = (len(token_times_s) - 1) / max(1e-9, token_times_s[-1] - token_times_s[0])
        line += f", then {rate:.1f} pieces/s"
    lines.append(f"{line} (as this client saw them)")
    if moved_bytes:
        lines.append(f"KV moved: {moved_bytes / 1e6:.2f} MB, from worker {source} to {target}")
    elif colocated:
        lines.append("KV moved: none (prefill and decode ran on one worker)")
    else:
        lines.append("KV moved: none")
    return "\n".join(lines)


def _stream(deployment: Deployment, question: str) -> Iterator[dict[str, Any]]:
    parts = urlsplit(deployment.url)
    body = {
        "model": deployment.model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": _ANSWER_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=_TIMEOUT_S)
    try:
        connection.request(
            "POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        response = connection.getresponse()
        if response.status != 200:
            raise LaunchError(f"HTTP {response.status}: {response.read(2000).decode()}")
        for raw in response:
            data = raw.decode().strip().removeprefix("data:").strip()
            if data == "[DONE]":
                return
            if data.startswith("{"):
                yield json.loads(data)
    finally:
        connection.close()
