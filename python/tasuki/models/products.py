"""Products of very few rows with what surrounds them, in Triton; CUDA only.

With few rows a product is the reading of its weight, and what costs beside it are
the ends of kernels: so the norm before it, the gate or the residual behind it are
part of its kernel, and a layer is four of these and its attention. There are no
tensor cores in it: each program holds some of the weight's rows times some columns in
registers, multiplies in float32 and sums over columns at the end.

    x [rows, size] ──norm?──▶ · weight [out, size] ──bias?──gate?──▶ (+) result [rows, out]

Nothing here owns state. Triton's interpreter runs it on the CPU (TRITON_INTERPRET=1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeGuard

import torch
import triton
import triton.language as tl

from tasuki.models.layers import PlainLinear

MAX_ROWS = 4
"""More rows are cuBLAS's: its tensor cores read the weight once for all of them."""

_COLUMNS = 512  # of the weight, a program at a time


@dataclass(frozen=True, slots=True)
class _Tile:
    """How a program works.

    Attributes:
        outs: Rows of the weight.
        warps: That share them.
        stages: Tiles in flight; 1: the loads of one tile, straight to registers.
    """

    outs: int
    warps: int
    stages: int


@triton.jit  # type: ignore[untyped-decorator]
def _product(  # type: ignore[no-untyped-def]
    x,
    x_stride,
    norm,
    weight,
    bias,
    result,
    result_stride,
    rows,
    out,
    eps,
    size: tl.constexpr,
    normed: tl.constexpr,
    biased: tl.constexpr,
    gated: tl.constexpr,
    added: tl.constexpr,
    tall: tl.constexpr,
    outs: tl.constexpr,
    columns: tl.constexpr,
    stages: tl.constexpr,
):
    row = tl.arange(0, tall)
    own = tl.program_id(0) * outs + tl.arange(0, outs)
    column = tl.arange(0, columns)[None, None, :]
    within = (row < rows)[:, None, None]
    x_at = x + row[:, None, None] * x_stride + column
    weight_at = weight + own.to(tl.int64)[None, :, None] * size + column
    sums = tl.zeros((tall, outs, columns), tl.float32)
    ups = tl.zeros((tall, outs, columns), tl.float32)
    squares = tl.zeros((tall, 1, columns), tl.float32)
    for k in tl.range(0, size, columns, num_stages=stages):
        values = tl.load(x_at + k, mask=within, other=0.0).to(tl.float32)
        if normed:
            squares += values * values
            values *= tl.load(norm + column + k).to(tl.float32)
        sums += tl.load(weight_at + k).to(tl.float32) * values
        if gated:
            up_at = weight_at + out.to(tl.int64) * size + k
            ups += tl.load(up_at).to(tl.float32) * values
    total = tl.sum(sums, axis=2)
    up = tl.sum(ups, axis=2)
    if normed:
        factor = tl.rsqrt(tl.sum(squares, axis=2) / size + eps)
        total *= factor
        up *= factor
    if biased:
        total += tl.load(bias + own).to(tl.float32)[None, :]
    if gated:
        total = total / (1.0 + tl.exp(-total)) * up
    at = result + row[:, None] * result_stride + own[None, :]
    mask = (row < rows)[:, None]
    if added:
        total += tl.load(at, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, total.to(result.dtype.element_ty), mask=mask)


def takes(product: object, rows: int) -> TypeGuard[PlainLinear]:
    """Whether the functions below take a product of so many rows."""
    if not isinstance(product, PlainLinear) or rows > MAX_ROWS:
        return False
    out, size = product.weight.shape
    return size % _COLUMNS == 0 and out % 16 == 0 and product.weight.is_contiguous()


def normed(product: PlainLinear, x: torch.Tensor, norm: torch.Tensor, eps: float) -> torch.Tensor:
    """The product of `x`, [rows, in] with adjacent elements, normalised; see `kernels.norm`."""
    result = x.new_empty(x.shape[0], product.weight.shape[0])
    _run(product, x, result, result.shape[1], _Tile(4, 2, 1), norm=norm, eps=eps)
    return result


def gated(product: PlainLinear, x: torch.Tensor, norm: torch.Tensor, eps: float) -> torch.Tensor:
    """`kernels.gated` of `normed`: [rows, in] to [rows, out / 2]."""
    result = x.new_empty(x.shape[0], product.weight.shape[0] // 2)
    _run(product, x, result, result.shape[1], _Tile(4, 4, 4), norm=norm, eps=eps, gated=True)
    return result


def add(product: PlainLinear, x: torch.Tensor, hidden: torch.Tensor) -> None:
    """Add the product of `x`, [rows, in] with adjacent elements, to `hidden` in place."""
    _run(product, x, hidden, hidden.shape[1], _Tile(8, 4, 5), added=True)


def _run(
    product: PlainLinear,
    x: torch.Tensor,
    result: torch.Tensor,
    out: int,
    tile: _Tile,
    *,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    added: bool = False,
) -> None:
    rows, size = x.shape
    weight, bias = product.weight, product.bias
    if not rows:
        return
    _product[(triton.cdiv(out, tile.outs),)](
        x,
        x.stride(0),
        weight if norm is None else norm,
        weight,
        weight if bias is None else bias,
        result,
        result.stride(0),
        rows,
        out,
        eps,
        size=size,
        normed=norm is not None,
        biased=bias is not None,
        gated=gated,
        added=added,
        tall=triton.next_power_of_2(rows),
        outs=tile.outs,
        columns=_COLUMNS,
        stages=tile.stages,
        num_warps=tile.warps,
    )
