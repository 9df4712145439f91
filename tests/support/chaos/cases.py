"""Requests of every kind, and the answers that they have where nothing goes wrong."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from support.chaos.asking import Asking, Document, Manner, ask
from support.chaos.ties import Ties
from support.deployment import MODEL_NAME
from support.models import VOCAB_SIZE

_LENGTHS = (3, 16, 40, 150, 333, 640)
_LONG_TOKENS = 1800
_OUTPUT_TOKENS = (20, 90)
_CASES_PER_KIND = 4
_SEED = 11
"""Of the cases. They are the same in every run: only faults and clients differ."""
LOGPROB_ERROR = 5e-3
"""Steps of other shapes round otherwise."""
MOST_UNSURE = 0.15
"""Of the cases: so many may be left out because their answers depend on rounding."""


@dataclass(frozen=True)
class Case:
    """A request and its answer without faults."""

    name: str
    path: str
    body: dict[str, Any]
    answer: Document


def difference(got: Document, expected: Document) -> str:
    """What is not as expected, in a line; empty: nothing."""
    if sorted(got.choices) != sorted(expected.choices):
        return f"choices {sorted(got.choices)}, expected {sorted(expected.choices)}"
    for index, want in expected.choices.items():
        have = got.choices[index]
        for name in ("tokens", "text", "finish_reason"):
            a, b = getattr(have, name), getattr(want, name)
            if a != b:
                at = "" if name == "finish_reason" else f" from {_differs_at(a, b)} on"
                return f"choice {index}: {name} differ{at}: {a!r}, expected {b!r}"
        if len(have.logprobs) != len(want.logprobs) or any(
            (a is None) != (b is None) or (a is not None and abs(a - b) > LOGPROB_ERROR)
            for a, b in zip(have.logprobs, want.logprobs, strict=True)
        ):
            return f"choice {index}: logprobs {have.logprobs}, expected {want.logprobs}"
    if _counts(got) != _counts(expected):
        return f"usage {_counts(got)}, expected {_counts(expected)}"
    return ""


def _counts(document: Document) -> tuple[int, int]:
    usage = document.usage or {}
    return usage.get("prompt_tokens", -1), usage.get("completion_tokens", -1)


def _differs_at(a: Sequence[Any], b: Sequence[Any]) -> int:
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


async def known(port: int, ties: Ties) -> list[Case]:
    """Every case with its answer.

    An answer that rests on rounding is left out: one that differs when it is asked again, in
    other company, or that `ties` finds.

    Raises:
        AssertionError: too many were.
    """
    asked = requests()
    quiet = await _answers(port, asked, 2)
    crowded = await _answers(port, asked[::-1], 12)
    cases = [
        Case(name, path, body, first)
        for (name, path, body), first, second in zip(asked, quiet, crowded[::-1], strict=True)
        if not difference(second, first) and not ties.rests_on_rounding(body, first)
    ]
    left_out = {name for name, *_ in asked} - {case.name for case in cases}
    assert len(left_out) <= MOST_UNSURE * len(asked), f"answers are not stable: {left_out}"
    return cases


Request = tuple[str, str, dict[str, Any]]


async def _answers(port: int, requests: Sequence[Request], at_once: int) -> list[Document]:
    places = asyncio.Semaphore(at_once)

    async def answer(request: Request) -> Document:
        _, path, body = request
        async with places:
            document = await ask(port, path, body, Asking(Manner.WHOLE))
        assert document is not None
        return document

    return await asyncio.gather(*(answer(request) for request in requests))


def requests() -> list[Request]:
    draw = random.Random(_SEED)
    shared = _tokens(draw, 200)  # in the prefix cache of some workers
    made: list[Request] = []
    for number in range(_CASES_PER_KIND):
        for kind, options in _kinds(draw).items():
            prompt = _tokens(draw, draw.choice(_LENGTHS))
            body = {"prompt": [*shared, *prompt] if number == 0 else prompt}
            path = "/v1/completions"
            if "messages" in options:
                body, path = {}, "/v1/chat/completions"
            common = {
                "model": MODEL_NAME,
                "max_tokens": draw.randint(*_OUTPUT_TOKENS),
                "ignore_eos": True,
                "return_token_ids": True,
                "seed": draw.randrange(2**31),
                "temperature": 0,
            }
            made.append((f"{kind}-{number}", path, {**common, **body, **options}))
    return made


def _kinds(draw: random.Random) -> dict[str, dict[str, Any]]:
    """What a request of each kind has besides a prompt, a length and a seed."""
    sampled = {"temperature": 1.0}
    penalties = {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.1}
    bias = {str(draw.randrange(3, VOCAB_SIZE)): draw.uniform(-5, 5) for _ in range(20)}
    return {
        "greedy": {},
        "sampled": sampled,
        "filters": {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
        "choices": {**sampled, "n": 3},
        "logprobs": {"logprobs": 3},
        "choices-logprobs": {**sampled, "n": 2, "logprobs": 1},
        "stop": {**sampled, "stop": [_word(draw) for _ in range(12)], "max_tokens": 90},
        "penalties": penalties,
        "penalties-sampled": {**sampled, **penalties, "logit_bias": bias},
        "ends": {**sampled, "ignore_eos": False, "logit_bias": {"2": 4.0}},
        "chat": {**sampled, "logprobs": True, "messages": _chat(draw)},
        "long": {"prompt": _tokens(draw, _LONG_TOKENS)},
        "prompts": {**sampled, "prompt": [_tokens(draw, n) for n in (5, 50)], "n": 2},
        "echo": {"echo": True, "logprobs": 1, "max_tokens": 12},
        "one": {"max_tokens": 1},
    }


def _tokens(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(3, VOCAB_SIZE) for _ in range(count)]


def _word(draw: random.Random) -> str:
    """One of those that the tokenizer has a token for."""
    return draw.choice("bcdfghklmnprstvw") + draw.choice("aeiou") + draw.choice(("st", "ng", "x"))


def _chat(draw: random.Random) -> list[dict[str, str]]:
    text = " ".join(_word(draw) for _ in range(draw.randint(3, 60)))
    return [{"role": "user", "content": text}]
