"""Plans of a wrapper for graphs: what goes through its `plan`, and what leaves it out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tasuki.attention.parts import Chunks
from tasuki.attention.quick_call import QuickPlan

PINNED = (torch.zeros(3), torch.zeros(3))


class Wrapper:
    """Divides work as FlashInfer's wrappers do, and notes how it was asked to."""

    def __init__(self, *, copies: bool = False) -> None:
        self.in_full: list[int] = []
        self.divided: list[tuple[Any, ...]] = []
        self._copies = copies
        self._jit_module: Any = None
        self._cached_module: Any = None
        self._paged_kv_indices_buf = torch.zeros(8, dtype=torch.int32)

    def plan(self, chunks: Chunks, pinned: torch.Tensor) -> None:
        self.in_full.append(chunks.rows.stop)
        lengths = chunks.lengths.clone() if self._copies else chunks.lengths
        self._cached_module = self._jit_module or SimpleNamespace(plan=self._divide)
        self._cached_module.plan(None, pinned, chunks.queries, chunks.blocks, lengths, 64)

    def _divide(self, *arguments: Any) -> None:
        self.divided.append(arguments)


def chunks(tokens: int, seed: int) -> Chunks:
    """Two sequences; the numbers mean nothing."""
    drawn = torch.randint(100, (10,), generator=torch.Generator().manual_seed(seed))
    arrays = drawn.int()
    blocks, queries, last, lengths = torch.split(arrays, [3, 3, 2, 2])
    indices = torch.arange(seed, seed + 5, dtype=torch.int32)
    rows = slice(0, tokens)
    return Chunks(rows, queries, 1, blocks, last, lengths, arrays, indices, whole=False)


def plan_all(wrapper: Wrapper, sizes: list[int]) -> torch.Tensor:
    """One plan after another; the arrays on the device afterwards."""
    arrays = torch.zeros(10, dtype=torch.int32)
    plans = QuickPlan(wrapper, arrays)
    for seed, size in enumerate(sizes):
        step, pinned = chunks(size, seed), PINNED[seed % 2]
        plans.plan(step, pinned, lambda step=step, pinned=pinned: wrapper.plan(step, pinned))
        wanted = (step.queries, step.blocks, step.lengths)
        assert wrapper.divided[-1][1] is pinned
        assert all(torch.equal(x, y) for x, y in zip(wrapper.divided[-1][2:5], wanted, strict=True))
        assert wrapper.divided[-1][5] == 64
    return arrays


@pytest.mark.parametrize(
    ("sizes", "in_full"),
    [([64, 32, 64, 32, 48, 48], [64, 32, 48]), ([32, 32, 32, 32], [32, 32])],
    ids=["rooms", "one room"],
)
def test_only_the_first_plan_of_a_size_is_in_full(sizes: list[int], in_full: list[int]) -> None:
    wrapper = Wrapper()
    arrays = plan_all(wrapper, sizes)
    assert wrapper.in_full == in_full
    assert len(wrapper.divided) == len(sizes)
    last = chunks(sizes[-1], len(sizes) - 1)
    assert torch.equal(arrays, last.arrays)
    assert torch.equal(wrapper._paged_kv_indices_buf[:5], last.indices)
    assert wrapper._jit_module is None


def test_arrays_that_are_not_found_make_every_plan_one_in_full() -> None:
    wrapper = Wrapper(copies=True)
    plan_all(wrapper, [64, 32, 64, 32])
    assert wrapper.in_full == [64, 32, 64, 32]


def test_a_wrapper_without_the_parts_is_planned_in_full() -> None:
    class OfAnotherVersion:
        def __init__(self) -> None:
            self._wrapper = Wrapper()
            self.in_full, self.divided = self._wrapper.in_full, self._wrapper.divided

        def plan(self, step: Chunks, pinned: torch.Tensor) -> None:
            self._wrapper.plan(step, pinned)

    wrapper: Any = OfAnotherVersion()
    plan_all(wrapper, [64, 32, 64])
    assert wrapper.in_full == [64, 32, 64]
