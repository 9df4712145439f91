"""Block tables laid end to end on the device, as FlashInfer reads them; CUDA only.

The tables are on the device already, in rows of one width; copying them from
there costs one small kernel instead of a second upload. This file owns no state.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_WIDTH = 256  # entries of a program


@triton.jit  # type: ignore[untyped-decorator]
def _flatten(tables, row_stride, begins, flat, width: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    begin = tl.load(begins + row)
    count = tl.load(begins + row + 1) - begin
    at = tl.program_id(1) * width + tl.arange(0, width)
    mask = at < count
    blocks = tl.load(tables + row * row_stride + at, mask=mask)
    tl.store(flat + begin + at, blocks, mask=mask)


def flatten(
    tables: torch.Tensor, begins: torch.Tensor, longest_blocks: int, flat: torch.Tensor
) -> None:
    """Write `tables[s, : begins[s + 1] - begins[s]]` to `flat` from `begins[s]` on.

    Args:
        tables: [S, W] int32, entries of a row adjacent.
        begins: [S + 1] int32, on the device.
        longest_blocks: the most entries of a row.
        flat: [at least begins[S]] int32.
    """
    grid = (begins.shape[0] - 1, triton.cdiv(longest_blocks, _WIDTH))
    _flatten[grid](tables, tables.stride(0), begins, flat, width=_WIDTH)
