"""The official `openai` client, unchanged, against the default model."""

from __future__ import annotations

import math
from collections.abc import Iterator

import openai
import pytest
from support.deployment import Deployment

ASK = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]


@pytest.fixture(scope="module")
def client(deployment: Deployment) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{deployment.url}/v1", api_key="unused", max_retries=0, timeout=120
    ) as client:
        yield client


def test_models(client: openai.OpenAI, deployment: Deployment) -> None:
    assert [model.id for model in client.models.list()] == [deployment.model]
    assert client.models.retrieve(deployment.model).id == deployment.model


def test_chat(client: openai.OpenAI, deployment: Deployment) -> None:
    answer = client.chat.completions.create(
        model=deployment.model, messages=ASK, temperature=0, max_completion_tokens=40
    )
    choice = answer.choices[0]
    assert "Paris" in (choice.message.content or "")
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == (
        answer.usage.prompt_tokens + answer.usage.completion_tokens
    )


def test_chat_streamed_equals_whole(client: openai.OpenAI, deployment: Deployment) -> None:
    whole = client.chat.completions.create(
        model=deployment.model, messages=ASK, temperature=0, max_completion_tokens=40
    )
    chunks = list(
        client.chat.completions.create(
            model=deployment.model,
            messages=ASK,
            temperature=0,
            max_completion_tokens=40,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    finishes = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert finishes[-1] == "stop" and set(finishes[:-1]) == {None}
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_completions_with_two_choices(client: openai.OpenAI, deployment: Deployment) -> None:
    def ask() -> list[str]:
        answer = client.completions.create(
            model=deployment.model, prompt="The sea is", n=2, seed=11, max_tokens=16
        )
        assert [choice.index for choice in answer.choices] == [0, 1]
        assert answer.usage is not None
        assert answer.usage.completion_tokens <= 32
        return [choice.text for choice in answer.choices]

    first = ask()
    assert first[0] != first[1]
    assert ask() == first, "the same seed gives the same choices"


def test_batch_of_prompts(client: openai.OpenAI, deployment: Deployment) -> None:
    prompts = ["The capital of France is", "1, 2, 3, 5, 8, 13,"]
    single = [
        client.completions.create(
            model=deployment.model, prompt=prompt, temperature=0, max_tokens=8
        )
        .choices[0]
        .text
        for prompt in prompts
    ]
    batch = client.completions.create(
        model=deployment.model, prompt=prompts, temperature=0, max_tokens=8
    )
    assert [choice.text for choice in batch.choices] == single
    assert [choice.index for choice in batch.choices] == [0, 1]


def test_chat_logprobs(client: openai.OpenAI, deployment: Deployment) -> None:
    answer = client.chat.completions.create(
        model=deployment.model,
        messages=ASK,
        temperature=0,
        max_completion_tokens=6,
        logprobs=True,
        top_logprobs=3,
    )
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None and len(content) == 6
    assert "".join(entry.token for entry in content) == answer.choices[0].message.content
    for entry in content:
        assert entry.bytes == list(entry.token.encode())
        assert len(entry.top_logprobs) == 3
        best = entry.top_logprobs[0]
        assert best.token == entry.token and best.logprob == pytest.approx(entry.logprob)
        assert sum(math.exp(top.logprob) for top in entry.top_logprobs) <= 1.0001


def test_completion_logprobs_and_echo(client: openai.OpenAI, deployment: Deployment) -> None:
    prompt = "The capital of France is"
    answer = client.completions.create(
        model=deployment.model, prompt=prompt, temperature=0, max_tokens=4, logprobs=2, echo=True
    )
    choice = answer.choices[0]
    assert choice.text.startswith(prompt + " Paris")
    assert choice.logprobs is not None
    tokens, offsets = choice.logprobs.tokens, choice.logprobs.text_offset
    values = choice.logprobs.token_logprobs
    assert tokens is not None and offsets is not None and values is not None
    assert len(tokens) == len(offsets) == len(values) == 5 + 4
    assert values[0] is None and all(value is not None and value <= 0 for value in values[1:])
    assert "".join(tokens) == choice.text
    assert [choice.text[o : o + len(t)] for o, t in zip(offsets, tokens, strict=True)] == tokens


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_stop_string_across_token_borders(
    client: openai.OpenAI, deployment: Deployment, stream: bool
) -> None:
    ask = {"model": deployment.model, "prompt": "1, 2, 3, 5, 8, 13,", "temperature": 0}
    free = client.completions.create(**ask, max_tokens=30).choices[0].text  # type: ignore[call-overload]
    # From the middle of one number to the middle of another: no token border there.
    stop = free[8:13]
    expected = free[: free.index(stop)]
    if stream:
        chunks = list(client.completions.create(**ask, max_tokens=30, stop=stop, stream=True))  # type: ignore[call-overload]
        text = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
        finish = [c.choices[0].finish_reason for c in chunks if c.choices][-1]
    else:
        choice = (
            client.completions.create(**ask, max_tokens=30, stop=["never", stop])  # type: ignore[call-overload]
        ).choices[0]
        text, finish = choice.text, choice.finish_reason
    assert text == expected
    assert finish == "stop"


def test_errors_are_the_clients_own_types(client: openai.OpenAI, deployment: Deployment) -> None:
    with pytest.raises(openai.NotFoundError, match="no-such"):
        client.completions.create(model="no-such", prompt="x")
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        client.completions.create(model=deployment.model, prompt="x", max_tokens=-1)


def test_hanging_up_frees_everything(client: openai.OpenAI, deployment: Deployment) -> None:
    """The answer ends long before its last token, and no block stays referenced."""
    most = 200
    deployment.wait_quiet()
    before = deployment.total("output_tokens_total")
    stream = client.completions.create(
        model=deployment.model,
        prompt="Once upon a time",
        max_tokens=most,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    for _ in range(3):
        next(stream)
    stream.close()
    deployment.wait_idle()
    assert deployment.total("output_tokens_total") - before < most / 2
