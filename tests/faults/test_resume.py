"""An answer goes on elsewhere as it began: choices, logprobs, stop strings and penalties.

The decode worker is killed when each choice of each request has tokens and none has ended.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.chaos.asking import Document
from support.chaos.cases import difference
from support.deployment import Deployment, Options
from support.models import VOCAB_SIZE
from support.pace import Pace
from support.waiting import until

pytestmark = pytest.mark.faults

TOKENS = 120
TOKENS_BEFORE = 8
"""Of each choice, when the worker is killed."""
STOP_CHARS = 4

SAMPLED = {"temperature": 1.0, "seed": 3}
PENALTIES = {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.1}
KINDS: dict[str, dict[str, Any]] = {
    "choices": {**SAMPLED, "n": 3},
    "logprobs": {"logprobs": 2},
    "penalties": PENALTIES,
    "stop": SAMPLED,
    "stop-choices": {**SAMPLED, **PENALTIES, "n": 2, "logprobs": 1},
}


class Asked:
    """One streamed request, and what has come of its answer."""

    def __init__(self, system: Deployment, body: dict[str, Any]) -> None:
        self._system = system
        self.body = body
        self.answer = Document()

    def stream(self) -> Document:
        """The whole answer."""
        options = {"stream": True, "stream_options": {"include_usage": True}}
        for event in self._system.http.events("/v1/completions", {**self.body, **options}):
            if event == "[DONE]":
                return self.answer
            chunk = json.loads(event)
            assert "error" not in chunk, chunk
            self.answer.take(chunk)
        raise AssertionError("the stream ended without [DONE]")

    def has_begun(self) -> bool:
        """Whether each choice has some tokens."""
        choices = list(self.answer.choices.values())
        begun = [choice for choice in choices if len(choice.tokens) >= TOKENS_BEFORE]
        return len(begun) == self.body.get("n", 1)

    def has_ended(self) -> bool:
        """Whether any choice has."""
        return any(choice.finish_reason for choice in list(self.answer.choices.values()))


@pytest.fixture
def system(tiny_model: Path, deploy: Callable[[Options], Deployment], pace: Pace) -> Deployment:
    options = ("--kv-memory", "50000000", "--max-batched-tokens", "256")
    modules = pace.modules("prefill-0", "decode-0")
    return deploy(Options(tiny_model, prefill=1, decode=1, worker=options, modules=modules))


def request(system: Deployment, kind: str) -> dict[str, Any]:
    draw = random.Random(kind)
    return {
        "model": system.model,
        "prompt": [draw.randrange(3, VOCAB_SIZE) for _ in range(draw.choice((16, 90, 300)))],
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "return_token_ids": True,
        "temperature": 0,
        **KINDS[kind],
    }


def late_part(answer: Document) -> str:
    """A part of the text that no choice has in its first half."""
    texts = [choice.text for choice in answer.choices.values()]
    for text in texts:
        for start in range(len(text) // 2, len(text) - STOP_CHARS):
            part = text[start : start + STOP_CHARS]
            if part.isascii() and not any(part in each[: len(each) // 2 + 1] for each in texts):
                return part
    raise AssertionError(f"every part comes early: {texts}")


def test_whatever_was_asked_goes_on_in_mid_stream(system: Deployment, pace: Pace) -> None:
    bodies = {kind: request(system, kind) for kind in KINDS}
    for kind in ("stop", "stop-choices"):
        bodies[kind]["stop"] = [late_part(Asked(system, bodies[kind]).stream())]
    undisturbed = {kind: Asked(system, body).stream() for kind, body in bodies.items()}
    reasons = {kind: answer.choices[0].finish_reason for kind, answer in undisturbed.items()}
    assert reasons["stop"] == "stop", reasons
    before = system.retries()
    asked = {kind: Asked(system, body) for kind, body in bodies.items()}

    def kill() -> None:
        until(lambda: all(each.has_begun() for each in asked.values()), system.logs)
        assert not any(each.has_ended() for each in asked.values())
        system.kill("decode-0")

    with pace.slow("decode"):
        *answers, _ = system.gather([*(each.stream for each in asked.values()), kill])
    assert system.retries() - before >= len(asked), "each was placed again"
    for kind, answer in zip(asked, answers, strict=True):
        assert not (found := difference(answer, undisturbed[kind])), f"{kind}: {found}"
