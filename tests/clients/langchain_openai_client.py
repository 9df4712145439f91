"""`langchain-openai`: whole, streamed, tools, errors, retries, abort."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import openai
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

URL, MODEL = os.environ["TASUKI_URL"], os.environ["TASUKI_MODEL"]
QUESTION = "What is the capital of France?"


def chat(**options: object) -> ChatOpenAI:
    """A client for the served model."""
    said = {"model": MODEL, "max_tokens": 16, "temperature": 0, "seed": 1} | options
    return ChatOpenAI(base_url=f"{URL}/v1", api_key="unused", **said)


@tool
def weather(city: Literal["Paris", "Rome"]) -> str:
    """The weather in a city."""
    return f"sunny in {city}"


def main() -> None:
    """Everything in turn."""
    whole = chat().invoke(QUESTION)
    assert "Paris" in whole.content, whole
    assert whole.usage_metadata["output_tokens"] > 0, whole
    print("langchain: whole:", whole.content)

    streamed = "".join(chunk.content for chunk in chat().stream(QUESTION))
    assert streamed == whole.content, streamed
    print("langchain: streamed gives the same text")

    with_tools = chat().bind_tools([weather]).invoke("What is the weather in Paris?")
    assert with_tools.content or with_tools.tool_calls, with_tools
    print("langchain: tools: calls", with_tools.tool_calls, "text", repr(with_tools.content))
    must_call = chat(max_tokens=64).bind_tools([weather], tool_choice="weather", strict=True)
    [call] = must_call.invoke("What is the weather in Paris?").tool_calls
    assert call["name"] == "weather" and call["args"]["city"] in ("Paris", "Rome"), call
    assert "sunny" in weather.invoke(call).content
    print("langchain: a call that must be made is made:", call["args"])

    schema = {
        "title": "capital",
        "type": "object",
        "properties": {"name": {"enum": ["Paris", "Rome"]}},
        "required": ["name"],
        "additionalProperties": False,
    }
    bound = chat(max_tokens=64).with_structured_output(schema, method="json_schema")
    assert bound.invoke(QUESTION)["name"] in ("Paris", "Rome")
    print("langchain: an answer keeps to a schema")

    try:
        nobody = {"type": "function", "function": {"name": "nobody"}}
        chat().bind_tools([weather]).invoke(QUESTION, tool_choice=nobody)
        raise AssertionError("a tool that is not there was not refused")
    except openai.BadRequestError as error:
        assert error.param == "tool_choice", error
    try:
        chat(model="nobody").invoke(QUESTION)
        raise AssertionError("a model that is not there answered")
    except openai.NotFoundError as error:
        assert MODEL in error.message, error
    print("langchain: errors have their types")

    with ThreadPoolExecutor(4) as pool:
        several = chat(max_tokens=64, max_retries=20)
        answers = list(pool.map(lambda _: several.invoke(QUESTION).content, range(4)))
    assert len(set(answers)) == 1 and "Paris" in answers[0], answers
    print("langchain: who was turned away came again")

    for number, _ in enumerate(chat(max_tokens=2000).stream("Count to a thousand.")):
        if number == 3:
            break
    print("langchain: left a stream")


main()
