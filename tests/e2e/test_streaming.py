"""Server-sent events byte by byte: framing, whole characters, order, first token early."""

from __future__ import annotations

import json

import pytest
from support.client import Client
from support.deployment import Deployment
from support.reference import load_prompts

CHARACTERS = ("japanese", "russian", "arabic", "hindi-emoji")


def raw_stream(client: Client, body: dict[str, object]) -> bytes:
    whole = {"model": client.model, "stream": True, "temperature": 0, **body}
    with client.http.stream("POST", "/v1/completions", json=whole) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        return b"".join(response.iter_raw())


def chunks(raw: bytes) -> list[dict[str, object]]:
    """The events but `[DONE]`, each decoded for itself: a split character would fail here."""
    events = [event for event in raw.split(b"\n\n") if event and not event.startswith(b":")]
    assert events[-1] == b"data: [DONE]"
    assert all(event.startswith(b"data: ") for event in events)
    return [json.loads(event.removeprefix(b"data: ").decode("utf-8")) for event in events[:-1]]


@pytest.mark.parametrize("name", CHARACTERS)
def test_characters_are_never_split(deployment: Deployment, name: str) -> None:
    prompt = next(p for p in load_prompts() if p.name == name).text
    body = {"prompt": prompt, "max_tokens": 40, "ignore_eos": True}
    document = deployment.http.post(
        "/v1/completions", {"model": deployment.model, "temperature": 0, **body}
    )
    whole = document["choices"][0]["text"]
    pieces = [c["choices"][0]["text"] for c in chunks(raw_stream(deployment.http, body))]
    assert "".join(pieces) == whole
    assert any(ord(character) > 127 for character in whole)
    # The reply may end inside a character; nowhere else may one be broken.
    assert "\ufffd" not in "".join(pieces).rstrip("\ufffd")


def test_random_bytes_stream_as_they_are_answered_whole(tiny: Deployment) -> None:
    """A random model writes broken UTF-8; replacement characters then agree."""
    for seed in range(8):
        body = {"prompt": f"bast {seed}", "max_tokens": 100, "ignore_eos": True}
        document = tiny.http.post(
            "/v1/completions", {"model": tiny.model, "temperature": 0, **body}
        )
        pieces = [c["choices"][0]["text"] for c in chunks(raw_stream(tiny.http, body))]
        assert "".join(pieces) == document["choices"][0]["text"]


def test_tokens_come_one_step_at_a_time(tiny: Deployment) -> None:
    """The answer is streamed, not gathered: many chunks, the first long before the last.

    So long an answer that it does not matter when this process gets to run.
    """
    answer = tiny.http.stream([7] * 50, max_tokens=2000)
    assert len(answer.tokens) == 2000
    assert len(set(answer.arrivals_s)) > 50
    assert answer.arrivals_s[0] - answer.sent_s < 0.5 * (answer.arrivals_s[-1] - answer.sent_s)


def test_tokenize_and_detokenize(tiny: Deployment) -> None:
    text = "gong 東京 🙂  12"
    tokens = tiny.http.post("/tokenize", {"model": tiny.model, "prompt": text})
    assert tokens["count"] == len(tokens["tokens"])
    assert tokens["max_model_len"] == 4096
    back = tiny.http.post("/detokenize", {"model": tiny.model, "tokens": tokens["tokens"]})
    assert back["prompt"] == text


def test_health_and_metrics(tiny: Deployment) -> None:
    for path in ("/health", "/live", "/ready"):
        assert tiny.http.http.get(path).status_code == 200, path
    tiny.http.stream([9] * 20, max_tokens=4)  # a first one, if no test has asked before
    metrics = tiny.metrics()
    histograms = {s.name for s in metrics.samples if s.name.endswith("_bucket")}
    for phase in ("time_to_first_token", "time_to_second_token", "inter_token_latency", "phase"):
        assert any(phase in name for name in histograms), (phase, histograms)
