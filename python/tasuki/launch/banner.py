"""What a person needs once the server is up; pure text."""

from __future__ import annotations

import json

QUESTION = "What is the capital of France?"


def banner(url: str, model: str, summary: str, key_variable: str | None = None) -> str:
    """URL, a `curl` and an `openai` snippet; both work as pasted, so nothing is indented.

    Args:
        url: Of the router, without a trailing slash.
        model: The served name.
        summary: What is running, one line.
        key_variable: Environment variable that has an API key; None: none is required.
    """
    message = {"role": "user", "content": QUESTION}
    body = {"model": model, "messages": [message], "max_tokens": 64, "temperature": 0}
    header = f' -H "Authorization: Bearer ${key_variable}"' if key_variable else ""
    imports = "import os\n" if key_variable else ""
    key = f'os.environ["{key_variable}"]' if key_variable else '"none"'
    return f"""
Serving {model} at {url}
{summary}

Try it with curl:

curl {url}/v1/chat/completions -H 'Content-Type: application/json'{header} -d '{json.dumps(body)}'

or from Python (pip install openai):

{imports}from openai import OpenAI
client = OpenAI(base_url="{url}/v1", api_key={key})
messages = [{{"role": "user", "content": "{QUESTION}"}}]
answer = client.chat.completions.create(model="{model}", messages=messages, temperature=0)
print(answer.choices[0].message.content)

Ctrl-C stops.
"""
