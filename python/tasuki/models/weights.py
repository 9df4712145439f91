"""The weight of a GEMM: how its numbers are kept, and which part a rank has.

Two schemes: dense, in the model's dtype, and fp8, float8_e4m3fn with a float32 scale for each
block. Scales of a folder are for blocks of 128 x 128, those of `quantize` for 1 x 128; where a
part of a weight begins within a block, or weights of other heights are put together, blocks are
cut smaller, so that each number keeps its scale:

    q  [576, 576]  128 128 128 128 64    |
    k  [192, 576]  128 64                |  joined: blocks of 64 rows
    v  [192, 576]  128 64                |

Weights are frozen once they are loaded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812

from tasuki.models.shard import Slice

FP8 = torch.float8_e4m3fn
LARGEST = 448.0  # of FP8
BLOCK = 128
_TRIALS = 16  # within a factor of two: beyond it they repeat
_ROWS_AT_ONCE = 1024  # quantized together, as far as memory is concerned


class Weight(Protocol):
    """What a GEMM multiplies by, [out, in]."""

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""

    def part(self, part: Slice) -> Weight:
        """Some of its rows or columns."""

    def dense(self) -> torch.Tensor:
        """[out, in] in the model's dtype."""


@dataclass(frozen=True, slots=True)
class DenseWeight:
    """A weight in the model's dtype; see `Weight`."""

    tensor: torch.Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """See `Weight`."""
        out, size = self.tensor.shape
        return out, size

    def part(self, part: Slice) -> DenseWeight:
        """See `Weight`."""
        return DenseWeight(self.tensor.narrow(part.dim, part.begin, part.end - part.begin))

    def dense(self) -> torch.Tensor:
        """See `Weight`."""
        return self.tensor


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """A weight in fp8; see `Weight`. What it stands for is `values` times its block's scale.

    Attributes:
        values: [out, in] float8_e4m3fn.
        scales: [blocks of rows, blocks of columns] float32.
        rows, columns: Of a block; they divide BLOCK.
        dtype: The model's.
    """

    values: torch.Tensor
    scales: torch.Tensor
    rows: int
    columns: int
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, int]:
        """See `Weight`."""
        out, size = self.values.shape
        return out, size

    def part(self, part: Slice) -> Fp8Weight:
        """See `Weight`; blocks are cut smaller where the part begins within one."""
        mine = [self.rows, self.columns]
        mine[part.dim] = math.gcd(mine[part.dim], part.begin)
        cut, size = self.cut(*mine), mine[part.dim]
        first, end = part.begin // size, -(-part.end // size)
        return replace(
            cut,
            values=cut.values.narrow(part.dim, part.begin, part.end - part.begin).contiguous(),
            scales=cut.scales.narrow(part.dim, first, end - first).contiguous(),
        )

    def cut(self, rows: int, columns: int) -> Fp8Weight:
        """The same with blocks of this size, which divides the present one."""
        scales = self.scales.repeat_interleave(self.rows // rows, 0)
        scales = scales.repeat_interleave(self.columns // columns, 1)
        out, size = self.shape
        scales = scales[: -(-out // rows), : -(-size // columns)].contiguous()
        return replace(self, scales=scales, rows=rows, columns=columns)

    def dense(self) -> torch.Tensor:
        """See `Weight`; rounded once."""
        out, size = self.shape
        scales = self.scales.repeat_interleave(self.rows, 0)[:out]
        scales = scales.repeat_interleave(self.columns, 1)[:, :size]
        return (self.values.float() * scales).to(self.dtype)


def quantize(weight: torch.Tensor) -> Fp8Weight:
    """Round a weight, [out, in], to fp8 with a scale for each BLOCK columns of a row.

    Of `_TRIALS` scales, from the least with which FP8 has the largest number on, a block gets
    that with the least squared error. That takes 28% from the error of blocks of 128 x 128.
    """
    out, size = weight.shape
    padded = F.pad(weight.float(), (0, -size % BLOCK))
    values = torch.empty_like(padded, dtype=FP8)
    scales = padded.new_empty(out, padded.shape[1] // BLOCK)
    for begin in range(0, out, _ROWS_AT_ONCE):
        rows = slice(begin, begin + _ROWS_AT_ONCE)
        blocks = padded[rows].view(-1, BLOCK)
        best = _best_scales(blocks)
        values[rows] = (blocks / best[:, None]).to(FP8).view_as(padded[rows])
        scales[rows] = best.view_as(scales[rows])
    return Fp8Weight(values[:, :size].contiguous(), scales, 1, BLOCK, weight.dtype)


def _best_scales(blocks: torch.Tensor) -> torch.Tensor:
    """Scales of [blocks, BLOCK] numbers."""
    largest = blocks.abs().amax(1)
    best = least = torch.where(largest > 0, largest / LARGEST, 1.0)
    best_error = torch.full_like(least, math.inf)
    for trial in range(_TRIALS):
        scales = least * 2 ** (trial / _TRIALS)
        rounded = (blocks / scales[:, None]).to(FP8).float() * scales[:, None]
        error = (rounded - blocks).square_().sum(1)
        best = torch.where(error < best_error, scales, best)
        best_error = torch.minimum(error, best_error)
    return best


def join(weights: Sequence[Weight]) -> Weight:
    """One weight of all rows, one after the other; dense unless all are of fp8."""
    fp8 = [weight for weight in weights if isinstance(weight, Fp8Weight)]
    if len(fp8) < len(weights):
        return DenseWeight(torch.cat([weight.dense() for weight in weights]))
    heights = [weight.shape[0] for weight in fp8]
    rows = math.gcd(*(weight.rows for weight in fp8), *heights[:-1])
    columns = math.gcd(*(weight.columns for weight in fp8))
    cut = [weight.cut(rows, columns) for weight in fp8]
    return replace(
        cut[0],
        values=torch.cat([each.values.view(torch.uint8) for each in cut]).view(FP8),
        scales=torch.cat([each.scales for each in cut]),
    )


class Tensors(Protocol):
    """Where a model's tensors come from."""

    def tensor(self, name: str, shape: tuple[int, ...], part: Slice | None = None) -> torch.Tensor:
        """The tensor of this name and shape, or part of it; the model's dtype and device."""

    def fp8(self, name: str, shape: tuple[int, ...]) -> Fp8Weight | None:
        """The weight of this name and shape, if it is kept in fp8."""


class Source:
    """Reads a model's tensors, and the weights of its GEMMs in the scheme that they are in.

    Args:
        tensors: All of a model's.
        quantized: Round weights to fp8 as they are read; a part of a weight has the same
            numbers as in the whole.
    """

    def __init__(self, tensors: Tensors, *, quantized: bool = False) -> None:
        self.tensors = tensors
        self._quantized = quantized

    def weight(self, name: str, shape: tuple[int, ...], part: Slice | None = None) -> Weight:
        """The weight of this name and whole shape, [out, in], or part of it."""
        stored = self.tensors.fp8(name, shape)
        if stored is not None:
            return stored if part is None else stored.part(part)
        if not self._quantized:
            return DenseWeight(self.tensors.tensor(name, shape, part))
        if part is None:
            return quantize(self.tensors.tensor(name, shape))
        begin = part.begin // BLOCK * BLOCK
        end = min(-(-part.end // BLOCK) * BLOCK, shape[part.dim])
        whole = quantize(self.tensors.tensor(name, shape, Slice(part.dim, begin, end)))
        return whole.part(Slice(part.dim, part.begin - begin, part.end - begin))
