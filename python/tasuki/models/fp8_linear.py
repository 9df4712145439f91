"""GEMMs whose weights are kept in fp8 (weights.py): CUDA only.

The input is rounded to fp8 as well, with a float32 scale for each 128 columns of a row
(`Rounded`), and fp8 is multiplied by fp8. The one row of a step that has no other is not
rounded: it is the sum of three rows of fp8, which take as long as one. Microseconds of a
layer's four GEMMs in Qwen3-4B's shape on an H200, in CUDA graphs:

    rows                           16    32    96   256   608  2048  4096
    bfloat16                       69    70    71    93   183   601  1219
    cuBLAS, scales of 1 x 128      44    46    52    86   152   488   920
    cuBLAS, scales of 128 x 128                           120   382   765
    our kernel for many rows      142   118   147   178   344   909  1675

(`benchmarks/gpu/fp8.py`.) Our kernel for few rows shortens whole steps of up to 32 rows
(benchmarks/RESULTS.md, fp8). With more its tensor cores wait for the scaling of each 128
columns' sums, and cuBLAS's are as fast or faster, however it is divided.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass, replace

import torch
import triton
from triton.errors import TritonError

from tasuki.device_limits import limits_of
from tasuki.models.fp8_kernels import few_rows_fp8, many_rows, round_rows
from tasuki.models.gemm_tiles import OUTS, Device, fp8_tiles_of, held_rows
from tasuki.models.layers import PlainLinear
from tasuki.models.weights import BLOCK, FP8, Fp8Weight
from tasuki.overlap import overlaps

log = logging.getLogger(__name__)

_refused: set[torch.device] = set()
_TALL, _OUTS, _GROUP, _STAGES, _WARPS = 128, 128, 8, 4, 8
_LOW, _LOW_WARPS = 64, 4  # with at most so many rows
_LEAST_OUTS = 32  # of a program, where there would be fewer programs than multiprocessors
_BLOCKS = 8  # of a program that rounds
_SPARE_BYTES = 1 << 10
_PADDING = 16  # cuBLAS takes rows in multiples of it
_PIECES = 3  # of one row: four bits each, where bfloat16 has eight and float16 eleven
FEW_ROWS = 32  # at most, for the kernel that is bound by the reading of the weight
AHEAD = 512  # columns of a weight's row that are prefetched
_SQUARE_ROWS = 256  # from so many on, cuBLAS is faster with scales of 128 x 128


@dataclass(frozen=True, slots=True)
class Rounded:
    """Rows in fp8: `values` [rows, size], times `scales` [rows, size / 128] float32.

    Attributes:
        all_values: [padded, size]: `values` and rows that nobody reads.
        all_scales: [padded, size / 128], the scales of a block of columns one after another.
        rows: How many are meant.
        dtype: That they stand for.
        pieces: Of fp8 that a row is the sum of; more than one of one row alone.
    """

    all_values: torch.Tensor
    all_scales: torch.Tensor
    rows: int
    dtype: torch.dtype
    pieces: int = 1

    @property
    def values(self) -> torch.Tensor:
        """[rows x pieces, size] fp8."""
        return self.all_values[: self.rows * self.pieces]

    @property
    def scales(self) -> torch.Tensor:
        """[rows x pieces, size / 128] float32."""
        return self.all_scales[: self.rows * self.pieces]

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and their size."""
        return self.rows, self.all_values.shape[1]

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.all_values.device

    def dense(self) -> torch.Tensor:
        """[rows, size] in their dtype."""
        rows = self.values.float() * self.scales.repeat_interleave(BLOCK, 1)
        return (rows if self.pieces == 1 else rows.sum(0, keepdim=True)).to(self.dtype)


def rounded(x: torch.Tensor) -> Rounded:
    """`x`, [rows, size] with adjacent elements, in fp8."""
    return _round(x, x.shape[1])


def norm_rounded(x: torch.Tensor, norm: torch.Tensor, eps: float) -> Rounded:
    """The norm of `x`, [rows, size], by root mean square, times `norm` [size], in fp8."""
    return _round(x, x.shape[1], norm=norm, eps=eps)


def add_norm_rounded(
    hidden: torch.Tensor, x: torch.Tensor, norm: torch.Tensor, eps: float
) -> Rounded:
    """Add `x` to `hidden` in place; the norm of the sum, all [rows, size], in fp8."""
    return _round(x, x.shape[1], norm=norm, eps=eps, hidden=hidden)


def gated_rounded(gate_up: torch.Tensor) -> Rounded:
    """silu of the first half of each row times the second: [rows, 2 x size], in fp8."""
    return _round(gate_up, gate_up.shape[1] // 2, gated=True)


def _round(
    x: torch.Tensor,
    size: int,
    *,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    hidden: torch.Tensor | None = None,
    gated: bool = False,
) -> Rounded:
    rows, count = x.shape[0], size // BLOCK
    pieces = _PIECES if rows == 1 else 1
    padded = -(-rows // _PADDING) * _PADDING
    result = Rounded(
        torch.empty(padded, size, dtype=FP8, device=x.device),
        torch.empty(count, padded, dtype=torch.float32, device=x.device).t(),
        rows,
        x.dtype,
        pieces,
    )
    if not rows:
        return result
    blocks = _BLOCKS if norm is None else triton.next_power_of_2(count)
    dependent = overlaps(x.device)
    added_to = x if hidden is None else hidden
    round_rows[(rows, triton.cdiv(count, blocks))](
        x,
        x.stride(0),
        added_to,
        added_to.stride(0),
        x if norm is None else norm,
        result.all_values,
        result.all_scales,
        result.all_scales.stride(1),
        eps,
        size=size,
        added=hidden is not None,
        normed=norm is not None,
        gated=gated,
        pieces=pieces,
        blocks=blocks,
        dependent=dependent,
        launch_pdl=dependent,
        num_warps=min(max(blocks // 4, 1), 16),
    )
    return result


class Fp8Linear:
    """A GEMM by a weight in fp8, [out, in], that `why_not` has nothing against.

    Few rows by a kernel of ours; more by cuBLAS where it knows these scales, else by another one.
    """

    def __init__(self, weight: Fp8Weight, bias: torch.Tensor | None) -> None:
        """Keep the weight; `bias` is [out]."""
        # Programs read the scales of a stretch of rows at a time, cuBLAS those of all rows.
        by_row = weight if weight.rows == 1 else weight.cut(1, BLOCK)
        self._row_scales = by_row.scales.t().contiguous().t()
        scales = self._row_scales if weight.rows == 1 else weight.scales.contiguous()
        self.weight = replace(weight, scales=scales)
        self.bias = bias
        device = weight.values.device
        self._by_library = weight.dtype == torch.bfloat16 and library_multiplies(device)
        limits = limits_of(device)
        programs = limits.cores if device.type == "cuda" else 1
        self._device = Device(limits.shared_bytes, programs, limits.has_tma)
        # By which the programs of a divided GEMM find out who is last; 0 between kernels.
        most = triton.cdiv(self.outs, OUTS)
        self._counters = torch.zeros(most, dtype=torch.int32, device=device)

    @property
    def outs(self) -> int:
        """Columns of the result."""
        return self.weight.shape[0]

    def __call__(self, x: torch.Tensor | Rounded) -> torch.Tensor:
        """See `Linear`."""
        if self._library_takes(x.shape[0]):
            return self._multiply(x if isinstance(x, Rounded) else rounded(x))
        out = self.weight.values.new_empty(x.shape[0], self.outs, dtype=x.dtype)
        return self.into(out, x)

    def into(self, out: torch.Tensor, x: torch.Tensor | Rounded) -> torch.Tensor:
        """Write the GEMM to `out`, [T, out] with adjacent elements, and return it."""
        if self._library_takes(x.shape[0]):
            return out.copy_(self(x))
        if x.shape[0] and self._compiled():
            try:
                launch = self._launch_few if x.shape[0] <= FEW_ROWS else self._launch_many
                return launch(out, x if isinstance(x, Rounded) else rounded(x))
            except TritonError as error:  # before anything ran
                _refused.add(self.weight.values.device)
                first = " ".join(str(error).split())[-400:]
                log.warning("fp8 kernels do not run on this GPU (%s); PyTorch's take over", first)
                return self.into(out, x)
        x = x.dense() if isinstance(x, Rounded) else x
        return PlainLinear(self.weight.dense(), self.bias).into(out, x)

    def _library_takes(self, rows: int) -> bool:
        return self._by_library and rows > 0 and (rows > FEW_ROWS or not self._compiled())

    def _multiply(self, x: Rounded) -> torch.Tensor:
        weight = self.weight
        square = weight.rows == BLOCK and weight.scales.shape[1] % 4 == 0
        scales = weight.scales if square and x.rows >= _SQUARE_ROWS else self._row_scales
        result = block_scaled(x, weight.values, scales)[: x.rows * x.pieces]
        if x.pieces > 1:
            result = result.sum(0, keepdim=True, dtype=torch.float32).to(x.dtype)
        if self.bias is not None:
            result += self.bias
        return result

    def _compiled(self) -> bool:
        return self.weight.values.device not in _refused

    def _launch_few(self, out: torch.Tensor, x: Rounded) -> torch.Tensor:
        weight, rows = self.weight, x.rows * x.pieces
        tiles = fp8_tiles_of(rows, *weight.shape, self._device)
        count = triton.cdiv(self.outs, tiles.outs)
        held = held_rows(rows)
        sums = count * tiles.split * tiles.outs * held if tiles.split > 1 else 0
        dependent = overlaps(x.device)
        few_rows_fp8[(count * tiles.split,)](
            x.all_values,
            x.all_scales,
            x.all_scales.stride(1),
            weight.values,
            weight.scales,
            *weight.scales.stride(),
            weight.values if self.bias is None else self.bias,
            out,
            out.new_empty(sums, dtype=torch.float32),
            self._counters,
            rows,
            self.outs,
            size=weight.shape[1],
            block_rows=weight.rows,
            split=tiles.split,
            biased=self.bias is not None,
            of_one=x.pieces > 1,
            held=held,
            outs=tiles.outs,
            stages=tiles.stages,
            dependent=dependent,
            ahead=AHEAD,
            launch_pdl=dependent,
            num_warps=tiles.warps,
        )
        return out

    def _launch_many(self, out: torch.Tensor, x: Rounded) -> torch.Tensor:
        weight, (rows, size) = self.weight, x.shape
        tall, warps = (_TALL, _WARPS) if rows > _LOW else (_LOW, _LOW_WARPS)
        tiles = triton.cdiv(rows, tall)
        few = tiles * triton.cdiv(self.outs, _OUTS) < limits_of(x.device).cores
        outs = _LEAST_OUTS if few else _OUTS
        dependent = overlaps(x.device)
        if rows:
            many_rows[(tiles * triton.cdiv(self.outs, outs),)](
                x.all_values,
                x.all_scales,
                x.all_scales.stride(1),
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
                outs=outs,
                group=_GROUP,
                stages=_stages(tall, x.device),
                dependent=dependent,
                launch_pdl=dependent,
                num_warps=warps,
            )
        return out


def block_scaled(x: Rounded, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """cuBLAS: [padded, out] of rows by `values` [out, size], each times its scales.

    Args:
        x: Rows.
        values: Of the weight.
        scales: [out, size / 128], those of a block of columns one after another; or
            [out / 128, size / 128], contiguous.
    """
    return torch._scaled_mm(x.all_values, values.t(), x.all_scales, scales.t(), out_dtype=x.dtype)


@functools.cache
def library_multiplies(device: torch.device) -> bool:
    """Whether cuBLAS multiplies blocks with scales of their own on this device: Hopper's does."""
    if device.type != "cuda":
        return False
    rows = torch.ones(_PADDING, 4 * BLOCK, dtype=torch.bfloat16, device=device)
    values = torch.ones(BLOCK, 4 * BLOCK, dtype=FP8, device=device)
    try:
        for height in (1, BLOCK):
            scales = torch.ones(4, BLOCK // height, device=device)
            scales = scales.t() if height == 1 else scales.t().contiguous()
            if not bool((block_scaled(rounded(rows), values, scales) == 4 * BLOCK).all()):
                return False
    except (TritonError, RuntimeError, AttributeError, TypeError, ValueError):
        return False
    return True


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
