"""Sampling on CUDA: the kernel draws what the CPU draws, and by the softmax."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from tasuki.engine.api import Leg, RequestSpec, SamplingParams
from tasuki.engine.plan import Draw
from tasuki.engine.request import Request
from tasuki.execution.sampler import NOT_FINITE, Sampler


def _draws(count: int, **params: Any) -> list[Draw]:
    params = {"temperature": 0.0, **params}
    draws = []
    for seed in range(count):
        sampling = SamplingParams(seed=seed, max_tokens=9, **params)
        request = Request(RequestSpec("r", Leg.COLOCATED, (1, 2, 3), sampling), 0, b"", 0.0)
        draws.append(Draw.next(request.sequences[0], 0))
    return draws


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.8},
        {"temperature": 1.0, "top_k": 7},
        {"temperature": 1.3, "top_k": 50, "top_p": 0.9},
        {"temperature": 1.0, "min_p": 0.1},
    ],
    ids=lambda params: " ".join(map(str, params)),
)
def test_the_gpu_draws_what_the_cpu_draws(params: dict[str, Any]) -> None:
    """The same uniforms through the same distribution, but for the last digits of exp."""
    count = 1000
    logits = torch.randn(1, 5000, generator=torch.Generator().manual_seed(1)) * 3
    draws = _draws(count, **params)
    with torch.inference_mode():
        rows = logits.expand(count, -1)
        there, here = (
            Sampler(each.device).sample(each, range(count), draws).tokens.tolist()
            for each in (rows.cuda(), rows)
        )
    assert sum(a == b for a, b in zip(there, here, strict=True)) > 0.99 * count


def test_draws_follow_the_softmax() -> None:
    count = 8000
    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(2), device="cpu") * 2
    draws = _draws(count, temperature=1.0)
    with torch.inference_mode():
        rows = logits.cuda().expand(count, -1)
        tokens = Sampler(rows.device).sample(rows, range(count), draws).tokens.tolist()
    wanted, found = logits.softmax(-1)[0], Counter(tokens)
    for token in wanted.topk(8).indices.tolist():
        p = float(wanted[token])
        assert abs(found[token] / count - p) < 4 * math.sqrt(p * (1 - p) / count)


def test_rows_that_are_not_finite_are_marked() -> None:
    logits = torch.zeros(4, 1000, device="cuda")
    logits[1, 5], logits[2, 6] = float("nan"), float("inf")
    sampler = Sampler(logits.device)
    for params in ({}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.5, "top_k": 3}):
        with torch.inference_mode():
            tokens = sampler.sample(logits, range(4), _draws(4, **params)).tokens.tolist()
        assert [token == NOT_FINITE for token in tokens] == [False, True, True, False]
