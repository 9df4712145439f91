"""`client.responses` of the official `openai` client, against the default model."""

from __future__ import annotations

import json
from collections.abc import Iterator

import openai
import pytest
from support.deployment import Deployment

QUESTION = "What is the capital of France? Answer in one sentence."


@pytest.fixture(scope="module")
def client(deployment: Deployment) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{deployment.url}/v1", api_key="unused", max_retries=0, timeout=120
    ) as client:
        yield client


def test_a_response_says_what_a_chat_says(client: openai.OpenAI, deployment: Deployment) -> None:
    response = client.responses.create(
        model=deployment.model, input=QUESTION, temperature=0, max_output_tokens=40
    )
    chat = client.chat.completions.create(
        model=deployment.model,
        messages=[{"role": "user", "content": QUESTION}],
        temperature=0,
        max_completion_tokens=40,
    )
    assert response.output_text == chat.choices[0].message.content
    assert response.status == "completed"
    assert response.usage is not None and chat.usage is not None
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert response.usage.output_tokens == chat.usage.completion_tokens
    assert response.usage.output_tokens_details.reasoning_tokens == 0


def test_streamed_equals_whole(client: openai.OpenAI, deployment: Deployment) -> None:
    whole = client.responses.create(
        model=deployment.model, input=QUESTION, temperature=0, max_output_tokens=4
    )
    events = list(
        client.responses.create(
            model=deployment.model,
            input=QUESTION,
            temperature=0,
            max_output_tokens=4,
            stream=True,
        )
    )
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    last = events[-1]
    assert last.type == "response.incomplete"
    assert "".join(deltas) == last.response.output_text == whole.output_text
    assert whole.status == last.response.status == "incomplete"
    assert whole.incomplete_details is not None
    assert whole.incomplete_details.reason == "max_output_tokens"


def test_an_answer_is_part_of_the_next_input(client: openai.OpenAI, deployment: Deployment) -> None:
    first = client.responses.create(
        model=deployment.model, input=QUESTION, temperature=0, max_output_tokens=40
    )
    said = [{"role": "user", "content": QUESTION}, *first.output]
    said.append({"role": "user", "content": "And of Italy?"})
    second = client.responses.create(
        model=deployment.model,
        instructions="Answer in one sentence.",
        input=said,  # type: ignore[arg-type]
        temperature=0,
        max_output_tokens=24,
    )
    assert second.usage is not None and first.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens
    assert second.instructions == "Answer in one sentence."


def test_an_answer_keeps_to_a_schema(client: openai.OpenAI, deployment: Deployment) -> None:
    schema = {
        "type": "object",
        "properties": {"capital": {"enum": ["Paris", "Rome"]}},
        "required": ["capital"],
        "additionalProperties": False,
    }
    response = client.responses.create(
        model=deployment.model,
        input=QUESTION,
        temperature=0,
        max_output_tokens=64,
        text={"format": {"type": "json_schema", "name": "capital", "schema": schema}},
    )
    assert json.loads(response.output_text)["capital"] in ("Paris", "Rome")


def test_refusals_name_the_field(client: openai.OpenAI, deployment: Deployment) -> None:
    for options, param in [
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"truncation": "auto"}, "truncation"),
    ]:
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.create(model=deployment.model, input="x", **options)  # type: ignore[call-overload]
        assert refused.value.param == param
    with pytest.raises(openai.NotFoundError, match="Nothing is stored here"):
        client.responses.retrieve("resp_1")


def test_hanging_up_frees_everything(client: openai.OpenAI, deployment: Deployment) -> None:
    """The answer ends long before its last token, and no block stays referenced."""
    most = 200
    deployment.wait_quiet()
    before = deployment.total("output_tokens_total")
    stream = client.responses.create(
        model=deployment.model,
        input="Count to a thousand.",
        max_output_tokens=most,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    for _ in range(5):
        next(stream)
    stream.close()
    deployment.wait_idle()
    assert deployment.total("output_tokens_total") - before < most / 2
