"""The GPU's search for the border against the CPU's sorting."""

from __future__ import annotations

import pytest
import torch
from engine_fakes import spec
from support.kernels import DEVICE

from tasuki.engine.nucleus import nucleus_floors
from tasuki.engine.sampler import _nucleus_floors

CASES = [(0, 0.9), (0, 0.01), (0, 0.999), (1, 1.0), (7, 1.0), (50, 0.8), (600, 0.5), (10**6, 0.7)]


def both(scaled: torch.Tensor, cases: list[tuple[int, float]]) -> tuple[list[float], list[float]]:
    params = [spec("r", [1], top_k=k, top_p=p).sampling for k, p in cases]
    here = _nucleus_floors(scaled, params)
    there = nucleus_floors(
        scaled.to(DEVICE),
        torch.tensor([k for k, _ in cases], dtype=torch.int32, device=DEVICE),
        torch.tensor([p for _, p in cases], dtype=torch.float64, device=DEVICE),
    )
    return there.tolist(), here.tolist()


@pytest.mark.parametrize("vocab", [5, 512, 5000])
def test_random_distributions(vocab: int) -> None:
    logits = torch.randn(len(CASES), vocab, generator=torch.Generator().manual_seed(vocab)) * 3
    there, here = both(logits - logits.amax(-1, keepdim=True), CASES)
    assert there == here


def test_ties_and_what_is_infinitely_unlikely() -> None:
    flat = torch.zeros(3, 300)
    flat[1:, 100:] = -1.0
    flat[2, 200:] = -float("inf")
    there, here = both(flat, [(3, 0.5), (150, 0.9), (0, 0.9)])
    assert there == here == [0.0, -1.0, -1.0]


def test_rows_that_lie_apart() -> None:
    wide = torch.randn(6, 400, generator=torch.Generator().manual_seed(1))
    scaled = (wide - wide[:, :300].amax(-1, keepdim=True))[:, :300]
    there, here = both(scaled, CASES[:6])
    assert there == here
