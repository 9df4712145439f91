"""`openai` for Python, `client.responses`: whole, streamed, tools, errors, retries, abort."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import openai
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, ConfigDict

URL, MODEL = os.environ["TASUKI_URL"], os.environ["TASUKI_MODEL"]
QUESTION = "What is the capital of France?"
WEATHER = {
    "type": "function",
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": False,
}


class Capital(BaseModel):
    """What an answer is bound to."""

    model_config = ConfigDict(extra="forbid")

    name: Literal["Paris", "Rome"]


def expect(kind: type[openai.APIStatusError], param: str, ask) -> None:
    """Fails unless the client raises this error about this field."""
    try:
        ask()
    except kind as error:
        assert error.param == param, error
        return
    raise AssertionError(f"{param} was taken")


def main() -> None:
    """Everything in turn."""
    client = openai.OpenAI(base_url=f"{URL}/v1", api_key="unused", max_retries=20)
    responses = client.responses
    asked = {"model": MODEL, "input": QUESTION, "max_output_tokens": 16, "temperature": 0}

    whole = responses.create(**asked, metadata={"a": "b"})
    assert "Paris" in whole.output_text, whole
    assert whole.usage.output_tokens > 0 and whole.metadata == {"a": "b"}, whole
    print("openai responses: whole:", whole.output_text)

    events = list(responses.create(**asked, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created", events[0]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text, deltas
    assert events[-1].response.output_text == whole.output_text, events[-1]
    with responses.stream(**asked | {"max_output_tokens": 200}) as stream:
        final = stream.get_final_response()
    assert final.status == "completed" and "Paris" in final.output_text, final
    print("openai responses: streamed gives the same text")

    again = [{"role": "user", "content": QUESTION}, *whole.output]
    again.append({"role": "user", "content": "And of Italy?"})
    longer = responses.create(**asked | {"input": again}, instructions="Be brief.")
    assert longer.usage.input_tokens > whole.usage.input_tokens, longer
    print("openai responses: an answer is the next input:", longer.output_text)

    with_tools = responses.create(**asked, tools=[WEATHER])
    assert with_tools.output and with_tools.tools[0].name == "weather", with_tools
    assert with_tools.usage.input_tokens > whole.usage.input_tokens, with_tools
    must_call = {"tools": [WEATHER], "tool_choice": {"type": "function", "name": "weather"}}
    called = responses.create(**asked | {"max_output_tokens": 64}, **must_call)
    [call] = called.output
    assert call.type == "function_call" and call.name == "weather", called
    assert json.loads(call.arguments)["city"] in ("Paris", "Rome"), call
    print("openai responses: a call that must be made is made:", call.arguments)
    bound = responses.parse(**asked | {"max_output_tokens": 64}, text_format=Capital)
    assert bound.output_parsed is not None and bound.output_parsed.name in ("Paris", "Rome")
    print("openai responses: an answer keeps to a schema")

    bad, missing = openai.BadRequestError, openai.NotFoundError
    expect(bad, "store", lambda: responses.create(**asked, store=True))
    expect(
        bad,
        "previous_response_id",
        lambda: responses.create(**asked, previous_response_id=whole.id),
    )
    expect(
        bad,
        "tools[0].type",
        lambda: responses.create(**asked, tools=[{"type": "web_search"}]),
    )
    expect(missing, "model", lambda: responses.create(**asked | {"model": "nobody"}))
    print("openai responses: errors have their types")

    chat = ChatOpenAI(
        base_url=f"{URL}/v1", api_key="unused", model=MODEL, temperature=0, use_responses_api=True
    )
    assert "Paris" in chat.invoke(QUESTION).text, "langchain's own translation"

    with ThreadPoolExecutor(4) as pool:
        long = asked | {"max_output_tokens": 64}
        answers = list(pool.map(lambda _: responses.create(**long).output_text, range(4)))
    assert len(set(answers)) == 1 and "Paris" in answers[0], answers
    print("openai responses: who was turned away came again")

    with responses.create(**asked | {"max_output_tokens": 2000}, stream=True) as stream:
        next(iter(stream))
    print("openai responses: left a stream")


main()
