"""GEMMs whose weights are kept in fp8 (weights.py): CUDA only.

With more than a few rows the input is rounded to fp8 as well, with a float32 scale for each 128
columns of a row (`Rounded`), and fp8 is multiplied by fp8.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
import triton
from triton.errors import TritonError

from tasuki.device_limits import limits_of
from tasuki.models.fp8_kernels import many_rows, round_rows
from tasuki.models.layers import PlainLinear
from tasuki.models.weights import BLOCK, FP8, LARGEST, Fp8Weight
from tasuki.overlap import overlaps

log = logging.getLogger(__name__)

_refused: set[torch.device] = set()
_TALL, _OUTS, _GROUP, _STAGES, _WARPS = 128, 128, 8, 4, 8
_LOW, _LOW_WARPS = 64, 4  # with at most so many rows
_BLOCKS = 8  # of a program that rounds
_SPARE_BYTES = 1 << 10


@dataclass(frozen=True, slots=True)
class Rounded:
    """Rows in fp8: `values` [rows, size], times `scales` [rows, size / 128] float32."""

    values: torch.Tensor
    scales: torch.Tensor
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and their size."""
        rows, size = self.values.shape
        return rows, size

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.values.device

    def dense(self) -> torch.Tensor:
        """[rows, size] in their dtype."""
        return (self.values.float() * self.scales.repeat_interleave(BLOCK, 1)).to(self.dtype)

    def copy_(self, x: torch.Tensor) -> None:
        """Round `x`, [rows, size], by PyTorch's operators."""
        blocks = x.float().view(x.shape[0], -1, BLOCK)
        largest = blocks.abs().amax(2)
        self.scales.copy_(torch.where(largest > 0, largest / LARGEST, 1.0))
        self.values.copy_((blocks / self.scales[:, :, None]).to(FP8).view(x.shape))

    @staticmethod
    def empty(rows: int, size: int, like: torch.Tensor | Rounded) -> Rounded:
        """Memory for so many rows on the device of `like`, whose dtype they stand for."""
        values = torch.empty(rows, size, dtype=FP8, device=like.device)
        scales = torch.empty(rows, size // BLOCK, dtype=torch.float32, device=like.device)
        return Rounded(values, scales, like.dtype)


def rounded(x: torch.Tensor, norm: torch.Tensor | None = None, eps: float = 0.0) -> Rounded:
    """`x`, [rows, size] with adjacent elements, or its norm by root mean square, in fp8."""
    rows, size = x.shape
    result = Rounded.empty(rows, size, x)
    if not rows:
        return result
    count = size // BLOCK
    blocks = triton.next_power_of_2(count) if norm is not None else _BLOCKS
    dependent = overlaps(x.device)
    round_rows[(rows, triton.cdiv(count, blocks))](
        x,
        x.stride(0),
        x if norm is None else norm,
        result.values,
        result.scales,
        eps,
        size=size,
        normed=norm is not None,
        blocks=blocks,
        dependent=dependent,
        launch_pdl=dependent,
        num_warps=min(max(blocks // 4, 1), 16),
    )
    return result


@dataclass(frozen=True, slots=True)
class Fp8Linear:
    """A GEMM by a weight in fp8, [out, in], that `why_not` has nothing against."""

    weight: Fp8Weight
    bias: torch.Tensor | None

    @property
    def outs(self) -> int:
        """Columns of the result."""
        return self.weight.shape[0]

    def __call__(self, x: torch.Tensor | Rounded) -> torch.Tensor:
        """See `Linear`."""
        out = self.weight.values.new_empty(x.shape[0], self.outs, dtype=x.dtype)
        return self.into(out, x)

    def into(self, out: torch.Tensor, x: torch.Tensor | Rounded) -> torch.Tensor:
        """Write the GEMM to `out`, [T, out] with adjacent elements, and return it."""
        if self._compiled():
            try:
                return self._launch(out, x if isinstance(x, Rounded) else rounded(x))
            except TritonError as error:  # before anything ran
                _refused.add(self.weight.values.device)
                first = " ".join(str(error).split())[-400:]
                log.warning("fp8 kernels do not run on this GPU (%s); PyTorch's take over", first)
        x = x.dense() if isinstance(x, Rounded) else x
        return PlainLinear(self.weight.dense(), self.bias).into(out, x)

    def _compiled(self) -> bool:
        return self.weight.values.device not in _refused

    def _launch(self, out: torch.Tensor, x: Rounded) -> torch.Tensor:
        weight, (rows, size) = self.weight, x.shape
        tall, warps = (_TALL, _WARPS) if rows > _LOW else (_LOW, _LOW_WARPS)
        dependent = overlaps(x.device)
        if rows:
            many_rows[(triton.cdiv(rows, tall) * triton.cdiv(self.outs, _OUTS),)](
                x.values,
                x.scales,
                weight.values,
                weight.scales,
                *weight.scales.stride(),
                weight.values if self.bias is None else self.bias,
                out,
                out.stride(0),
                rows,
                self.outs,
                size=size,
                block_rows=weight.rows,
                biased=self.bias is not None,
                tall=tall,
                outs=_OUTS,
                group=_GROUP,
                stages=_stages(tall, x.device),
                dependent=dependent,
                launch_pdl=dependent,
                num_warps=warps,
            )
        return out


def _stages(tall: int, device: torch.device) -> int:
    """Steps whose tiles are on their way at a time, as shared memory has room."""
    return min(_STAGES, (limits_of(device).shared_bytes - _SPARE_BYTES) // (BLOCK * (tall + _OUTS)))


def why_not(weight: Fp8Weight) -> str | None:
    """Why kernels do not read this weight as it is; None: they do."""
    limits = limits_of(weight.values.device)
    if not limits.has_fp8:
        major, minor = limits.capability
        return f"fp8 needs compute capability 8.9, this GPU has {major}.{minor}"
    if weight.dtype not in (torch.bfloat16, torch.float16):
        return "kernels multiply fp8 by bfloat16 or float16"
    size = weight.shape[1]
    if size % BLOCK:
        return f"{size} inputs are no multiple of {BLOCK}"
    if weight.columns != BLOCK:
        return f"a rank's part begins within a block of {BLOCK} columns"
    return None
