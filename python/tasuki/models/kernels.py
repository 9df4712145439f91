"""Small fused kernels of a layer, in Triton; CUDA only.

Each reads its inputs once and writes its result once; arithmetic is float32,
rounded where PyTorch's separate operators would round the residual. Triton's
interpreter runs them on the CPU (TRITON_INTERPRET=1). This file owns no state.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tasuki.overlap import overlaps

_GATED_WIDTH = 1024  # elements of a program


@triton.jit  # type: ignore[untyped-decorator]
def _norm(  # type: ignore[no-untyped-def]
    hidden,
    hidden_stride,
    x,
    x_stride,
    weight,
    result,
    eps,
    size: tl.constexpr,
    with_add: tl.constexpr,
    width: tl.constexpr,
    dependent: tl.constexpr,
):
    if dependent:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, width)
    mask = at < size
    own = hidden + row * hidden_stride + at
    values = tl.load(own, mask=mask, other=0.0).to(tl.float32)
    if with_add:
        values += tl.load(x + row * x_stride + at, mask=mask, other=0.0).to(tl.float32)
        rounded = values.to(hidden.dtype.element_ty)
        tl.store(own, rounded, mask=mask)
        values = rounded.to(tl.float32)
    factor = tl.rsqrt(tl.sum(values * values, axis=0) / size + eps)
    scaled = values * factor * tl.load(weight + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(result + row * size + at, scaled.to(result.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _gated(  # type: ignore[no-untyped-def]
    gate_up, result, inner, width: tl.constexpr, dependent: tl.constexpr
):
    if dependent:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * width + tl.arange(0, width)
    mask = at < inner
    source = gate_up + row * (2 * inner) + at
    gate = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(source + inner, mask=mask, other=0.0).to(tl.float32)
    product = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(result + row * inner + at, product.to(result.dtype.element_ty), mask=mask)


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """[T, size] normalised by root mean square, times `weight` [size]; rows may be strided."""
    return _run_norm(x, None, weight, eps)


def add_norm(
    hidden: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Add `x` to `hidden` in place; return the norm of the sum, all [T, size]."""
    return _run_norm(hidden, x, weight, eps)


def gated(gate_up: torch.Tensor) -> torch.Tensor:
    """silu of the first half of each row times the second: [T, 2 x inner] to [T, inner]."""
    rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    result = gate_up.new_empty(rows, inner)
    if rows:
        grid = (rows, triton.cdiv(inner, _GATED_WIDTH))
        dependent = overlaps(gate_up.device)
        _gated[grid](
            gate_up,
            result,
            inner,
            width=_GATED_WIDTH,
            dependent=dependent,
            launch_pdl=dependent,
        )
    return result


def _run_norm(
    hidden: torch.Tensor, x: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    rows, size = hidden.shape
    result = hidden.new_empty(rows, size)
    if rows:
        width = triton.next_power_of_2(size)
        other = hidden if x is None else x
        dependent = overlaps(hidden.device)
        _norm[(rows,)](
            hidden,
            hidden.stride(0),
            other,
            other.stride(0),
            weight,
            result,
            eps,
            size=size,
            with_add=x is not None,
            width=width,
            dependent=dependent,
            launch_pdl=dependent,
            num_warps=min(max(width // 512, 1), 16),
        )
    return result
