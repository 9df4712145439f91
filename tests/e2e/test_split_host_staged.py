"""Split requests whose KV passes through host memory."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from support.deployment import Deployment, Options
from support.models import VOCAB_SIZE


def test_answers_are_those_of_the_other_transport(
    tiny: Deployment, deploy: Callable[[Options], Deployment], tiny_model: Path
) -> None:
    worker = ("--kv-memory", "64000000", "--transport", "host-staged")
    staged = deploy(Options(tiny_model, prefill=1, decode=1, worker=worker))
    draw = random.Random("host-staged")
    prompts = [[draw.randrange(3, VOCAB_SIZE) for _ in range(n)] for n in (1, 17, 300, 900)]

    def ask(deployment: Deployment, prompt: list[int]) -> list[int]:
        answer = deployment.http.stream(prompt, max_tokens=16)
        assert answer.timings is not None and answer.timings["transfer_bytes"] > 0
        return answer.tokens

    with ThreadPoolExecutor(len(prompts)) as threads:
        found = list(threads.map(lambda prompt: ask(staged, prompt), prompts))
    assert found == [ask(tiny, prompt) for prompt in prompts]
