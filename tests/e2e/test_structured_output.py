"""Answers keep to what their request asks for: HTTP in, real workers, a model of noise.

The model's answers are random text, so an answer that matches does so because of its grammar.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.deployment import Deployment, Options

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["a", "bb", None]},
        "sizes": {"type": "array", "items": {"type": "integer", "maximum": 99}, "maxItems": 3},
    },
    "required": ["kind", "sizes"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "look", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "look_away"}},
]
NAMED = {"type": "function", "function": {"name": "look"}}


@pytest.fixture(scope="module")
def system(deploy_for_module: Callable[[Options], Deployment], tiny_model: Path) -> Deployment:
    """The tiny model, which writes calls as Hermes does."""
    router = ("--tool-parser", "hermes", "--reasoning-parser", "none")
    memory = ("--kv-memory", "64000000")
    return deploy_for_module(Options(tiny_model, prefill=1, decode=1, worker=memory, router=router))


def ask(system: Deployment, path: str, **fields: Any) -> list[dict[str, Any]]:
    subject: dict[str, Any] = {"prompt": "say " * 20}
    if path == CHAT:
        subject = {"messages": [{"role": "user", "content": "say " * 20}]}
    body = {"model": system.model, "max_tokens": 300, "seed": 5, "temperature": 1.0}
    response = system.http.http.post(path, json={**body, **subject, **fields})
    assert response.status_code == 200, response.text
    choices: list[dict[str, Any]] = response.json()["choices"]
    return choices


def is_answer(text: str) -> bool:
    try:
        answer = json.loads(text)
    except ValueError:
        return False
    return (
        list(answer) == ["kind", "sizes"]
        and answer["kind"] in ("a", "bb", None)
        and len(answer["sizes"]) <= 3
        and all(isinstance(size, int) and size <= 99 for size in answer["sizes"])
    )


@pytest.mark.parametrize(
    ("fields", "matches"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            is_answer,
        ),
        ({"guided_json": json.dumps(SCHEMA)}, is_answer),
        (
            {"structured_outputs": {"regex": "^[a-f]{4,9}/[0-9]{2}$"}},
            re.compile("[a-f]{4,9}/[0-9]{2}").fullmatch,
        ),
        ({"guided_choice": ["yes", "yes, sir", "no"]}, {"yes", "yes, sir", "no"}.__contains__),
        ({"guided_grammar": 'start: "(" start ")" | "x"'}, re.compile(r"\(*x\)*").fullmatch),
    ],
    ids=["response_format", "guided_json", "regex", "choice", "grammar"],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_answers_match(
    system: Deployment, path: str, fields: dict[str, Any], matches: Callable[[str], object]
) -> None:
    choices = ask(system, path, n=3, **fields)
    for choice in choices:
        text = choice["message"]["content"] if path == CHAT else choice["text"]
        assert choice["finish_reason"] == "stop", choice
        assert matches(text), text
    free = ask(system, path)[0]
    text = free["message"]["content"] if path == CHAT else free["text"]
    assert not matches(text), "noise matches by itself"


def test_a_stream_says_the_same(system: Deployment) -> None:
    whole = ask(system, COMPLETIONS, guided_json=SCHEMA)[0]["text"]
    streamed = system.http.stream(
        "say " * 20, max_tokens=300, seed=5, temperature=1.0, guided_json=SCHEMA
    )
    assert streamed.finish_reason == "stop"
    assert streamed.text == whole  # although it ignored the end token
    assert is_answer(streamed.text)


def test_generate_takes_sglangs_fields(system: Deployment) -> None:
    sampling = {"max_new_tokens": 300, "json_schema": json.dumps(SCHEMA), "sampling_seed": 5}
    response = system.http.http.post("/generate", json={"text": "say", "sampling_params": sampling})
    assert response.status_code == 200, response.text
    assert is_answer(response.json()["text"])


@pytest.mark.parametrize(
    ("choice", "names"), [("required", {"look", "look_away"}), (NAMED, {"look"})]
)
def test_calls_are_made_where_they_are_required(
    system: Deployment, choice: Any, names: set[str]
) -> None:
    once = {"parallel_tool_calls": False}
    for answer in ask(system, CHAT, n=4, tools=TOOLS, tool_choice=choice, **once):
        assert answer["finish_reason"] == "tool_calls", answer
        assert answer["message"]["content"] is None
        [call] = answer["message"]["tool_calls"]
        assert call["function"]["name"] in names
        arguments = call["function"]["arguments"]
        if call["function"]["name"] == "look":
            assert is_answer(arguments), arguments
        else:
            assert json.loads(arguments) == {}
