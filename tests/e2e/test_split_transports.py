"""Split requests whose KV moves by another transport than NIXL."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.deployment import Deployment, Options
from support.models import VOCAB_SIZE
from support.transports import WITHOUT_NIXL, skip_unless_there


@pytest.mark.parametrize("transport", WITHOUT_NIXL)
def test_answers_are_those_of_one_worker(
    transport: str, deploy: Callable[[Options], Deployment], tiny_model: Path
) -> None:
    skip_unless_there(transport)
    worker = ("--kv-memory", "64000000", "--transport", transport, "--kv-digest", "all")
    split = deploy(Options(tiny_model, prefill=1, decode=1, worker=worker))
    colocated = deploy(Options(tiny_model, mixed=1, worker=("--kv-memory", "64000000")))
    draw = random.Random(transport)
    prompts = [[draw.randrange(3, VOCAB_SIZE) for _ in range(n)] for n in (1, 17, 300, 900)]

    def ask(deployment: Deployment, prompt: list[int], moved: bool) -> list[int]:
        answer = deployment.http.stream(prompt, max_tokens=16)
        assert answer.timings is not None and (answer.timings["transfer_bytes"] > 0) == moved
        return answer.tokens

    with ThreadPoolExecutor(len(prompts)) as threads:
        found = list(threads.map(lambda prompt: ask(split, prompt, True), prompts))
    assert found == [ask(colocated, prompt, False) for prompt in prompts]
