"""Chat through the official `openai` client, streamed, with the time of each phase.

tasuki serve                      # in another terminal
pip install openai
python examples/chat.py "What is the capital of France?"
"""

from __future__ import annotations

import os
import sys

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("TASUKI_URL", "http://127.0.0.1:8000") + "/v1", api_key="unused"
)
model = client.models.list().data[0].id
question = " ".join(sys.argv[1:]) or "What is the capital of France?"
stream = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": question}],
    max_tokens=200,
    temperature=0,
    stream=True,
    stream_options={"include_usage": True},  # the last chunk says where the time went
)
timings: dict[str, object] = {}
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    timings = (chunk.model_extra or {}).get("timings") or timings
print("\n")
for phase, value in timings.items():
    print(f"{phase:24} {value}")
