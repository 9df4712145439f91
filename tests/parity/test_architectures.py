"""Whole-system parity of tiny random-weight models, split 1:1, against `transformers`.

Random weights make chaotic output: one wrong number in the cache, one mask off
by one, and the rest of the answer differs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from compare import compare
from support.deployment import Deployment, Options
from support.models import ARCHITECTURES, SOME_WINDOWS, VOCAB_SIZE
from support.reference import STEPS, greedy, load_float32

# The window of the Mistral is 40 tokens: most of these are longer.
BLOCK_TOKENS = 16
PROMPT_LENGTHS = (1, 15, 16, 17, 39, 41, 100, 160, 333, 700)


def blocks_moved(windows: Sequence[int | None], tokens: int) -> int:
    """Blocks that the decode worker needs of a context: with a window, those that it shows."""
    end = -(-tokens // BLOCK_TOKENS)
    seen = [0 if window is None else max(0, tokens + 1 - window) for window in windows]
    return sum(end - first // BLOCK_TOKENS for first in seen)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_split_equals_transformers(
    architecture: str,
    tiny_models: Callable[[str], Path],
    deploy: Callable[[Options], Deployment],
) -> None:
    path = tiny_models(architecture)
    draw = random.Random(7)
    prompts = [[draw.randrange(3, VOCAB_SIZE) for _ in range(n)] for n in PROMPT_LENGTHS]
    model = load_float32(path)
    references = [greedy(model, f"{architecture}-{len(p)}", p, STEPS) for p in prompts]

    options = ("--kv-memory", "64000000", "--max-batched-tokens", "128")
    deployment = deploy(Options(path, prefill=1, decode=1, worker=options))

    def ask(prompt: list[int], count: int) -> list[int]:
        return deployment.http.complete(prompt, max_tokens=count).tokens

    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda p: ask(p, STEPS), prompts))
    moved = deployment.total("kv_pulled_blocks_total", "decode")
    # Layers of one kind are one group, whose block is moved as one.
    groups = {"mistral-window": (40,), "some-windows": SOME_WINDOWS}.get(architecture, (None,))
    assert moved == sum(blocks_moved(groups, n) for n in PROMPT_LENGTHS)
    ties = []
    for reference, answer in zip(references, answers, strict=True):
        ties += compare(reference, answer, ask)
    for tie in ties:
        print(f"near-tie of {architecture}: {tie}")
    assert len(ties) <= 1
    assert deployment.total("prompt_tokens_computed_total", "decode") == 0
