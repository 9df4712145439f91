"""The largest step that is profiled is a real one: as many tokens, each in a slot of its own."""

from __future__ import annotations

import pytest
import torch

from tasuki.worker.config import Limits
from tasuki.worker.profile import _batch, _lengths


@pytest.mark.parametrize(
    ("tokens", "longest", "lengths"),
    [(100, 4096, [100]), (100, 40, [40, 40, 20]), (80, 40, [40, 40])],
)
def test_the_step_is_full(tokens: int, longest: int, lengths: list[int]) -> None:
    limits = Limits(block_size=16, max_batched_tokens=tokens, max_running_requests=30)
    assert _lengths(tokens, longest) == lengths
    tables = [-(-length // 16) for length in lengths]
    batch = _batch(lengths, tables, limits, torch.device("cpu"))
    assert len(batch.tokens) == len(batch.positions) == tokens
    assert len(batch.slots.unique()) == tokens
    assert int(batch.slots.max()) < 16 * sum(tables)
    assert batch.logits_rows.tolist() == list(range(tokens - 30, tokens))
    for row, (length, blocks) in enumerate(zip(lengths, tables, strict=True)):
        begin = sum(lengths[:row])
        slots = batch.slots[begin : begin + length]
        wanted = batch.block_tables[row][:blocks].repeat_interleave(16)[:length]
        assert torch.equal(slots // 16, wanted.long())
