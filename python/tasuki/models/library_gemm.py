"""What the kernels of gemm_kernels.py compute, by PyTorch's operators.

For a GPU that a kernel of ours does not fit: slower, and never refused.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

from tasuki.models.layers import PlainLinear
from tasuki.models.ops import Weighted


def multiply(
    gemm: PlainLinear,
    x: torch.Tensor,
    result: torch.Tensor,
    eps: float,
    *,
    norm: torch.Tensor | None,
    gated: bool,
    added: bool,
    squares: torch.Tensor | None,
    left: Weighted | None,
) -> None:
    """Multiply `x`, [rows, in], by the weight, with what surrounds it, into `result`.

    Args:
        gemm: weight [out, in] and bias.
        x: rows; with `squares` weighted (`Weighted.x`).
        result: [rows, out], of a gated one [rows, out / 2]; with `added` what is added to.
        eps: of the norm.
        norm: weight of the norm before (of one row, without `squares`), or with `added`
            after the multiplication.
        gated: silu of the first half of the columns times the second.
        added: to what `result` holds.
        squares: see `Weighted`.
        left: filled for the GEMM after this one.
    """
    rows, size = x.shape
    if norm is not None and not added and squares is None and rows == 1:
        x = torch.rms_norm(x.float(), (size,), norm.float(), eps).to(x.dtype)
    total = F.linear(x, gemm.weight).float()
    if squares is not None:
        total *= torch.rsqrt(squares.sum(0)[:rows, None] / size + eps)
    if gemm.bias is not None:
        total += gemm.bias.float()
    if gated:
        gate, up = total.chunk(2, -1)
        total = F.silu(gate) * up
    if added:
        total += result.float()
    result.copy_(total)
    if left is not None:
        assert norm is not None
        rounded = result.float()
        left.x.copy_(rounded * norm.float())
        left.squares.zero_()
        left.squares[0, :rows] = rounded.square().sum(1)
