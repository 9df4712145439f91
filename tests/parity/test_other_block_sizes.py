"""Whole-system parity, split 1:1, where the two workers' blocks have different sizes.

As in `test_architectures.py`: tiny random-weight models, whose answers one wrong number in the
cache changes, against `transformers`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from compare import compare
from support.deployment import Deployment, Options
from support.models import VOCAB_SIZE
from support.reference import STEPS, greedy, load_float32

LENGTHS = (1, 15, 16, 33, 100, 333, 700)
SHARED = 96  # tokens of a beginning that further prompts share with the last one


@pytest.mark.parametrize(
    ("architecture", "prefill", "decode"),
    [
        ("llama", 16, 32),
        ("llama", 32, 16),
        ("some-windows", 16, 40),
        pytest.param("some-windows", 32, 16, marks=pytest.mark.long),
        pytest.param("mistral-window", 16, 32, marks=pytest.mark.long),
        pytest.param("llama", 13, 48, marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("transport", ["nixl", pytest.param("host-staged", marks=pytest.mark.long)])
def test_split_equals_transformers(
    architecture: str,
    prefill: int,
    decode: int,
    transport: str,
    tiny_models: Callable[[str], Path],
    deploy: Callable[[Options], Deployment],
) -> None:
    path = tiny_models(architecture)
    draw = random.Random(11)
    prompts = [[draw.randrange(3, VOCAB_SIZE) for _ in range(n)] for n in LENGTHS]
    # Their beginning is cached on both sides when they come, and ends inside a remote block.
    later = [
        prompts[-1][:SHARED] + [draw.randrange(3, VOCAB_SIZE) for _ in range(n)] for n in (5, 70)
    ]
    model = load_float32(path)
    references = [greedy(model, f"{architecture}-{len(p)}", p, STEPS) for p in (*prompts, *later)]
    options = ("--kv-memory", "64000000", "--max-batched-tokens", "128", "--transport", transport)
    deployment = deploy(
        Options(
            path,
            prefill=1,
            decode=1,
            worker=options,
            by_role={
                "prefill": ("--block-size", str(prefill)),
                "decode": ("--block-size", str(decode)),
            },
        )
    )

    def ask(prompt: list[int], count: int) -> list[int]:
        return deployment.http.complete(prompt, max_tokens=count).tokens

    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda p: ask(p, STEPS), prompts))
    deployment.wait_quiet()
    before = deployment.total("kv_pulled_blocks_total", "decode")
    if architecture == "llama":
        assert before == sum(-(-n // decode) for n in LENGTHS)
    answers += [ask(prompt, STEPS) for prompt in later]
    deployment.wait_quiet()
    if architecture == "llama":
        moved = deployment.total("kv_pulled_blocks_total", "decode") - before
        assert moved == sum(-(-len(p) // decode) - SHARED // decode for p in later)
    ties = []
    for reference, answer in zip(references, answers, strict=True):
        ties += compare(reference, answer, ask)
    assert len(ties) <= 1, ties
    assert deployment.total("prompt_tokens_computed_total", "decode") == 0
    assert deployment.total("kv_pull_failures_total", "decode") == 0
