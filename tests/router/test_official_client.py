"""Further ways of the official `openai` client, against the real system."""

from __future__ import annotations

import asyncio
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


def test_the_clients_own_stream_helper(client: openai.OpenAI, deployment: Deployment) -> None:
    with client.chat.completions.stream(
        model=deployment.model, messages=ASK, temperature=0, max_completion_tokens=24
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert "Paris" in (final.choices[0].message.content or "")
    assert final.choices[0].finish_reason == "stop"


def test_timings_are_in_the_header_and_the_last_chunk(
    client: openai.OpenAI, deployment: Deployment
) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=deployment.model, messages=ASK, max_completion_tokens=4
    )
    entries = dict(entry.split(";dur=") for entry in raw.headers["server-timing"].split(", "))
    assert float(entries["total"]) >= float(entries["first_token"]) > 0
    assert float(entries["transfer"]) > 0, "1 prefill + 1 decode: the KV moved"
    assert raw.headers["x-request-id"] == raw.parse().id
    chunks = list(
        client.completions.create(
            model=deployment.model,
            prompt="The sea is",
            max_tokens=4,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    timings = chunks[-1].model_extra["timings"] if chunks[-1].model_extra else {}
    assert timings["total_ms"] >= timings["first_token_ms"] > 0
    assert timings["transfer_bytes"] > 0
    for worker in (timings["prefill_worker"], timings["decode_worker"]):
        assert worker and "127.0.0.1" not in worker and ":" not in worker


def test_many_async_streams_at_once(deployment: Deployment) -> None:
    async def ask(client: openai.AsyncOpenAI, number: int) -> str:
        stream = await client.completions.create(
            model=deployment.model,
            prompt=f"{number}, {number + 1}, {number + 2},",
            temperature=0,
            max_tokens=8,
            stream=True,
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def run() -> tuple[list[str], list[str]]:
        async with openai.AsyncOpenAI(
            base_url=f"{deployment.url}/v1", api_key="unused", max_retries=0, timeout=120
        ) as client:
            together = await asyncio.gather(*(ask(client, number) for number in range(4)))
            alone = [await ask(client, number) for number in range(4)]
            return list(together), alone

    together, alone = asyncio.run(run())
    assert all(together)
    assert together == alone


def test_tools_and_content_parts_reach_the_template(
    client: openai.OpenAI, deployment: Deployment
) -> None:
    parts = [{"type": "text", "text": ASK[0]["content"]}]
    in_parts = client.chat.completions.create(
        model=deployment.model,
        messages=[{"role": "user", "content": parts}],  # type: ignore[list-item]
        temperature=0,
        max_completion_tokens=12,
        tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}],
        tool_choice="none",
    )
    plain = client.chat.completions.create(
        model=deployment.model, messages=ASK, temperature=0, max_completion_tokens=12
    )
    assert in_parts.choices[0].message.content == plain.choices[0].message.content
    assert in_parts.usage is not None and plain.usage is not None
    assert in_parts.usage.prompt_tokens == plain.usage.prompt_tokens


def test_a_repeated_prompt_is_counted_as_cached(
    client: openai.OpenAI, deployment: Deployment
) -> None:
    prompt = "A prompt that nobody else has asked before. " * 12
    usages = []
    for _ in range(2):
        answer = client.completions.create(model=deployment.model, prompt=prompt, max_tokens=2)
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        usages.append(answer.usage)
    first, second = (usage.prompt_tokens_details.cached_tokens for usage in usages)
    assert first == 0
    assert second is not None and 0 < second < usages[1].prompt_tokens
    assert second % 16 == 0, "whole blocks"


def test_bias_and_penalties_reach_the_sampler(
    client: openai.OpenAI, deployment: Deployment
) -> None:
    def first_token(**options: object) -> int:
        answer = client.completions.create(
            model=deployment.model,
            prompt="The capital of France is",
            temperature=0,
            max_tokens=1,
            extra_body={"return_token_ids": True},
            **options,  # type: ignore[arg-type]
        )
        extra = answer.choices[0].model_extra
        assert extra is not None
        return int(extra["token_ids"][0])

    usual = first_token()
    assert first_token(logit_bias={str(usual): -100}) != usual
    assert first_token(logit_bias={"345": 100}) == 345
