"""Chunks beside decodes where even a small one makes a step much longer, and where it does not.

Step times are those of two models on two GPUs, as formulas: no model, no torch.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from tasuki.engine import step_size
from tasuki.engine.config import EngineConfig
from tasuki.engine.stats import StepRates, StepSample

CONTEXT = 5_000  # of a sequence that decodes
GPU = EngineConfig(
    num_blocks=20_000,
    max_model_len=200_000,
    vocab_size=99,
    block_size=32,
    max_batched_tokens=4_096,
    itl_target_s=9e-3,
)
StepTime = Callable[[int, int, float], float]
"""Seconds by decodes, prompt tokens and their squares."""


def experts_s(decodes: int, prompt_tokens: int, squares: float) -> float:
    """Qwen3-30B-A3B on an H100: what the simulator's data sheet says."""
    tokens = decodes + prompt_tokens
    reached = 1.0 - (1.0 - 8 / 128) ** tokens
    read = 2 * (1.5e9 + 29e9 * reached) + 98_304 * CONTEXT * decodes
    compute_s = (6.6e9 * tokens + 4 * 48 * 4_096 * squares / 2) / (0.62 * 989e12)
    return max(read / (0.64 * 3.35e12), compute_s) + 48 * 12e-6


def dense_s(decodes: int, prompt_tokens: int, squares: float) -> float:
    """Qwen3-4B on an H200, nearly as measured."""
    decode_s = 2.7e-3 + 1.5e-5 * decodes + 2.6e-8 * CONTEXT * decodes
    return decode_s + 7.7e-6 * prompt_tokens + 4e-10 * squares


@dataclass(frozen=True)
class Served:
    """Chunks and times of the steps with prompts."""

    chunks: list[int]
    steps_s: list[float]

    @property
    def tokens_per_s(self) -> float:
        return sum(self.chunks) / sum(self.steps_s)


def serve(
    step_s: StepTime, *, decodes: int, prompt: int, waiting: int = 2, noise: float, seed: int = 1
) -> Served:
    """A worker whose decodes go on while prompts are computed, a few at most waiting."""
    draw, rates = random.Random(seed), StepRates()
    served = Served([], [])

    def record(sequences: int, chunk: int, squares: float) -> None:
        took_s = step_s(sequences, chunk, squares) * draw.lognormvariate(0.0, noise)
        rates.record(StepSample(1, took_s, sequences, CONTEXT * sequences, chunk, squares))
        if chunk and sequences:
            served.chunks.append(chunk)
            served.steps_s.append(took_s)

    for _ in range(10):
        record(decodes, 0, 0.0)
    while len(served.chunks) < 600:
        start, behind = 0, prompt * draw.randrange(waiting)
        now = max(1, decodes + draw.randint(-decodes // 4, decodes // 4))
        while start < prompt:
            backlog = prompt - start + behind
            tokens = step_size.step_tokens(GPU, rates, now, CONTEXT * now, backlog)
            chunk = min(max(tokens - now, GPU.block_size), prompt - start)
            record(now, chunk, chunk * (2.0 * start + chunk))
            start += chunk
        for _ in range(draw.randrange(4)):
            record(now, 0, 0.0)
    return served


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("seed", range(5))
def test_few_decodes_of_a_model_with_experts_leave_prompts_a_third_of_their_rate(
    noise: float, seed: int
):
    served = serve(experts_s, decodes=4, prompt=5_000, noise=noise, seed=seed)
    assert served.tokens_per_s > 18_000  # 2,000 where chunks are as small as the target wants
    smallest_s = experts_s(4, 64, 64.0**2)
    assert sorted(served.steps_s)[300] < 1.7 * smallest_s * (1.0 + noise)


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize(
    ("decodes", "prompt"), [(50, 512), (24, 5_000), (4, 5_000), (2, 100_000), (60, 20_000)]
)
def test_a_dense_models_chunks_are_as_the_target_wants(
    decodes: int, prompt: int, noise: float, monkeypatch: pytest.MonkeyPatch
):
    served = serve(dense_s, decodes=decodes, prompt=prompt, noise=noise)
    monkeypatch.setattr(step_size, "_OVERHEAD_SHARE", 0.0)
    without = serve(dense_s, decodes=decodes, prompt=prompt, noise=noise)
    assert served == without


def test_many_decodes_of_a_model_with_experts_read_them_all():
    """Prompts then cost what they cost a dense model, and the target decides."""
    served = serve(experts_s, decodes=128, prompt=5_000, noise=0.05)
    decode_s = experts_s(128, 0, 0.0)
    assert sorted(served.steps_s)[300] < 2.0 * decode_s
