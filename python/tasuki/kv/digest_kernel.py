"""Digests of KV units on a GPU, by one launch: what `digest.py` defines.

Each program has one unit, one head and a part of the unit's columns, and goes through the rows:
a row's words are multiplied by the row's key and added up; the sums are multiplied by their
columns' keys at the end. Parts are added up by atomics, whose order does not matter.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

_PART = 1024  # columns of a program, at most


@triton.jit  # type: ignore[untyped-decorator]
def _digest(  # type: ignore[no-untyped-def]
    words,
    units,
    row_keys,
    column_keys,
    out,
    per_block,
    first_head,
    heads,
    block_stride,
    head_stride,
    row_stride,
    rows,
    columns,
    part: tl.constexpr,
):
    index, head = tl.program_id(0), tl.program_id(1)
    unit = tl.load(units + index)
    column = tl.program_id(2) * part + tl.arange(0, part)
    inside = column < columns
    block = unit // per_block
    begin = block * block_stride + (first_head + head).to(tl.int64) * head_stride
    place = words + begin + (unit % per_block) * columns + column
    total = tl.zeros((part,), dtype=tl.int64)
    for row in range(rows):
        word = tl.load(place + row * row_stride, mask=inside, other=0).to(tl.int64)
        total += word * tl.load(row_keys + row)
    weighted = total * tl.load(column_keys + column, mask=inside, other=0)
    tl.atomic_add(out + index * heads + head, tl.sum(weighted), sem="relaxed")


def digest(
    words: torch.Tensor,
    units: torch.Tensor,
    per_block: int,
    first_head: int,
    heads: int,
    row_keys: torch.Tensor,
    column_keys: torch.Tensor,
) -> torch.Tensor:
    """Digests of units, on the current stream.

    Args:
        words: [num_blocks, kv_heads, rows, words of a block's row] integers, contiguous.
        units: [units] int64.
        per_block: Units in a block.
        first_head: The first head.
        heads: How many.
        row_keys: [rows] int64.
        column_keys: [words of a unit's row] int64.

    Returns:
        [units, heads] int64.
    """
    out = torch.zeros((len(units), heads), dtype=torch.int64, device=words.device)
    columns = column_keys.numel()
    part = min(_PART, triton.next_power_of_2(columns))
    grid = (len(units), heads, triton.cdiv(columns, part))
    kernel: Any = _digest
    kernel[grid](
        words,
        units,
        row_keys,
        column_keys,
        out,
        per_block,
        first_head,
        heads,
        words.stride(0),
        words.stride(1),
        words.stride(2),
        words.shape[2],
        columns,
        part=part,
        num_warps=4,
    )
    return out
