"""What a client can get wrong is answered with 4xx, value and limit, and disturbs nobody."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from support.client import Answer
from support.deployment import Deployment

CONTEXT = 4096
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]

# Path, what replaces or joins a good body, the status, and what the message must name.
CASES: dict[str, tuple[str, dict[str, Any], int, tuple[str, ...]]] = {
    "over-long prompt": (COMPLETIONS, {"prompt": [5] * 5000}, 400, ("5000", str(CONTEXT))),
    "prompt and output too long": (
        COMPLETIONS,
        {"prompt": [5] * 4000, "max_tokens": 200},
        400,
        ("4000", "200", str(CONTEXT)),
    ),
    "unknown model": (COMPLETIONS, {"model": "no-such"}, 404, ("no-such",)),
    "unknown model, chat": (CHAT, {"model": "no-such"}, 404, ("no-such",)),
    "wrong type of max_tokens": (COMPLETIONS, {"max_tokens": "many"}, 400, ("max_tokens",)),
    "wrong type of prompt": (COMPLETIONS, {"prompt": {"a": 1}}, 400, ("prompt",)),
    "wrong type of messages": (CHAT, {"messages": "hello"}, 400, ("messages",)),
    "negative max_tokens": (COMPLETIONS, {"max_tokens": -3}, 400, ("max_tokens", "-3")),
    "zero max_tokens": (CHAT, {"max_tokens": 0}, 400, ("max_tokens", "0")),
    "no messages": (CHAT, {"messages": []}, 400, ("messages",)),
    "empty prompt": (COMPLETIONS, {"prompt": []}, 400, ("prompt",)),
    "no prompt": (COMPLETIONS, {"prompt": None}, 400, ("prompt",)),
    "token outside the vocabulary": (COMPLETIONS, {"prompt": [5, 600]}, 400, ("600", "512")),
    "negative token": (COMPLETIONS, {"prompt": [5, -1]}, 400, ("prompt",)),
    "temperature": (COMPLETIONS, {"temperature": 7.5}, 400, ("temperature", "7.5", "2")),
    "top_p": (COMPLETIONS, {"top_p": 1.5}, 400, ("top_p", "1.5", "1")),
    "n of zero": (COMPLETIONS, {"n": 0}, 400, ("n", "0")),
    "n too large": (COMPLETIONS, {"n": 100_000}, 400, ("100000",)),
    "logprobs too large": (COMPLETIONS, {"logprobs": 10_000}, 400, ("logprobs", "10000")),
    "too many stop strings": (COMPLETIONS, {"stop": ["x"] * 1000}, 400, ("stop", "1000")),
    "best_of": (COMPLETIONS, {"best_of": 3}, 400, ("best_of",)),
    "suffix": (COMPLETIONS, {"suffix": "end"}, 400, ("suffix",)),
    "response format": (
        CHAT,
        {"response_format": {"type": "xml"}},
        400,
        ("response_format", "xml"),
    ),
    "two constraints": (
        COMPLETIONS,
        {"guided_json": {}, "regex": "a"},
        400,
        ("guided_json and regex",),
    ),
    "schema": (
        CHAT,
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
        400,
        ("response_format", "keywords not"),
    ),
    "regular expression": (COMPLETIONS, {"guided_regex": "(a"}, 400, ("guided_regex", "unclosed")),
    "grammar": (COMPLETIONS, {"guided_grammar": "root ::= a"}, 400, ("guided_grammar",)),
    "choice": (COMPLETIONS, {"guided_choice": []}, 400, ("guided_choice",)),
    "tools that the model would not see": (
        CHAT,
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        400,
        ("tools", "chat template"),
    ),
    "documents that the model would not see": (
        CHAT,
        {"documents": [{"text": "x"}]},
        400,
        ("documents", "chat template"),
    ),
    "call without tools": (CHAT, {"tool_choice": "required"}, 400, ("tool_choice", "tools")),
    "unknown role type": (CHAT, {"messages": [{"role": 3, "content": "x"}]}, 400, ("role",)),
}


@pytest.fixture(scope="module", autouse=True)
def good_request_meanwhile(tiny: Deployment) -> Iterator[None]:
    """A good stream runs while the bad requests come in, and is not disturbed."""
    undisturbed = tiny.http.stream("hello", max_tokens=300)
    answers: list[Answer] = []
    failures: list[BaseException] = []
    over = threading.Event()

    def keep_asking() -> None:
        try:
            while not over.is_set():
                answers.append(tiny.http.stream("hello", max_tokens=300))
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=keep_asking)
    thread.start()
    yield
    over.set()
    thread.join(60)
    assert not failures, failures
    assert answers
    assert all(answer.tokens == undisturbed.tokens for answer in answers)
    tiny.wait_idle()


def good_body(tiny: Deployment, path: str) -> dict[str, Any]:
    subject = {"messages": HELLO} if path == CHAT else {"prompt": "hello"}
    return {"model": tiny.model, "max_tokens": 3, **subject}


def assert_error(status: int, body: str, wanted: int, named: tuple[str, ...] = ()) -> None:
    assert status == wanted, (status, body)
    error = json.loads(body)["error"]
    assert {"message", "type", "param", "code"} <= error.keys()
    for word in named:
        assert word in error["message"], error["message"]
    assert "127.0.0.1" not in body


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_bad_field(tiny: Deployment, case: str, stream: bool) -> None:
    path, change, status, named = CASES[case]
    body = {**good_body(tiny, path), **change, "stream": stream}
    response = tiny.http.http.post(path, json=body)
    assert_error(response.status_code, response.text, status, named)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b'{"model": "test-model", "prompt": "x",}', 400),
        (b"[1, 2]", 400),
        (b"null", 400),
        (b'{"model": "test-model", "prompt": "\xff\xfe", "messages": "\xff"}', 400),
        (b'{"a":' * 5000, 400),
        (b'{"prompt": "' + b"x" * 10_000_000 + b'"}', 413),
    ],
    ids=["empty", "cut off", "trailing comma", "a list", "null", "bad UTF-8", "deep", "10 MB"],
)
def test_bad_body(tiny: Deployment, path: str, content: bytes, status: int) -> None:
    response = tiny.http.http.post(
        path, content=content, headers={"content-type": "application/json"}
    )
    named = ("8388608",) if status == 413 else ()
    assert_error(response.status_code, response.text, status, named)


def test_wrong_method_and_unknown_path(tiny: Deployment) -> None:
    response = tiny.http.http.get(COMPLETIONS)
    assert_error(response.status_code, response.text, 405)
    response = tiny.http.http.get("/v1/nothing")
    assert_error(response.status_code, response.text, 404)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("field", "value", "parts"),
    [
        ("no_such_field", {"deep": [1]}, ("no_such_field is not a field", "docs/api.md")),
        ("max_token", 3, ("max_token is not a field", "did you mean max_tokens?")),
        ("ebnf", "root ::= x", ("ebnf is not supported", "in Lark")),
    ],
)
def test_a_field_that_would_be_ignored_is_refused(
    tiny: Deployment, path: str, field: str, value: object, parts: tuple[str, ...]
) -> None:
    response = tiny.http.http.post(path, json={**good_body(tiny, path), field: value})
    assert_error(response.status_code, response.text, 400, parts)
    assert response.json()["error"]["param"] == field


def test_fields_that_ask_for_nothing_are_accepted(tiny: Deployment) -> None:
    nothing = {"user": "u", "metadata": {"a": "b"}, "guided_json": None, "length_penalty": 1.0}
    document = tiny.http.post(COMPLETIONS, {**good_body(tiny, COMPLETIONS), **nothing})
    assert document["choices"][0]["finish_reason"] in ("length", "stop")


def test_template_of_the_client_is_refused(tiny: Deployment) -> None:
    """Templates are programs: a client may not bring its own unless the operator allows it."""
    body = {**good_body(tiny, CHAT), "chat_template": "{{ raise_exception('no') }}"}
    response = tiny.http.http.post(CHAT, json=body)
    assert_error(response.status_code, response.text, 400, ("chat_template",))
