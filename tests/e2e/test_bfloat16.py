"""Weights and caches of fewer bits through HTTP on the CPU, split and colocated.

A number's sums have one order on one processor, so the tokens must be the same ones, near
ties included, although prompts are cut into other chunks and batches.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from support.deployment import Deployment, Options
from support.models import VOCAB_SIZE

LENGTHS = (1, 17, 300, 900)
ANSWER_TOKENS = 24
Deploy = Callable[[Options], Deployment]


def prompts() -> list[list[int]]:
    draw = random.Random(7)
    return [[draw.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]


def answers(deployment: Deployment, *, at_once: bool) -> list[list[int]]:
    def ask(prompt: list[int]) -> list[int]:
        tokens: list[int] = deployment.http.complete(prompt, max_tokens=ANSWER_TOKENS).tokens
        return tokens

    if at_once:
        return deployment.gather([lambda prompt=prompt: ask(prompt) for prompt in prompts()])
    return [ask(prompt) for prompt in prompts()]


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_split_serving_gives_the_tokens_of_colocated_serving(
    tiny_model: Path, deploy: Deploy, quantization: str
) -> None:
    worker = ("--kv-memory", "64000000", "--quantization", quantization)
    split = deploy(Options(tiny_model, prefill=1, decode=1, worker=worker, dtype="bfloat16"))
    kept = "int8 weights" if quantization == "int8" else "kernels: Tasuki's own for the CPU"
    assert split.logs().count(kept) == 2
    together = answers(split, at_once=True)
    assert all(len(tokens) == ANSWER_TOKENS for tokens in together)
    assert split.total("kv_pulled_blocks_total", "decode") > 0

    colocated = deploy(Options(tiny_model, mixed=1, worker=worker, dtype="bfloat16"))
    assert answers(colocated, at_once=False) == together


def test_an_fp8_cache_moves_with_its_scales(tiny_model: Path, deploy: Deploy) -> None:
    """Both sides measure the same scales, else they would not exchange KV."""
    worker = ("--kv-memory", "64000000", "--quantization", "fp8", "--kv-dtype", "fp8")
    split = deploy(Options(tiny_model, prefill=1, decode=1, worker=worker, dtype="float32"))
    assert split.logs().count("KV scales: measured") == 2
    alone = answers(split, at_once=False)
    assert all(len(tokens) == ANSWER_TOKENS for tokens in alone)
    assert split.total("kv_pulled_blocks_total", "decode") > 0
    colocated = deploy(Options(tiny_model, mixed=1, worker=worker, dtype="float32"))
    assert answers(colocated, at_once=False) == alone
