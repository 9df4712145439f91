"""GEMMs of few rows with what surrounds them: which kernel, and how divided.

Measured on an H200 over the GEMMs of a 4B model's 36 layers with their norms, gates and
additions, in a CUDA graph (ms; 1.69 is the weights' bytes at the speed of a copy):

    rows     cuBLAS and our kernels between    these
       1     2.62                              1.98
       4     2.67                              2.29
      16     2.70                              2.29
      32     2.75                              2.44
      48     2.80                              2.65
      96     2.89                              3.04

Columns were divided by powers of two then, and nothing was prefetched: on an H100 a step of
one row is 1.4% shorter since, one of 16 rows 2.6%, one of 64 rows 0.4%, and from 96 rows on
cuBLAS is as fast or faster (benchmarks/RESULTS.md). With more rows what counts is that
neighbours share what they read, which these kernels cannot. From 49 rows on, on Hopper and after,
what a step reads is copied in blocks by a description of them (TMA); with fewer rows copies by the
threads are faster. Of 80 rows the kernels then take less time than cuBLAS in Qwen3-4B's shape, and
not in Llama-3-8B's.

A tensor core's operand goes there without passing through registers, so that the norm before
more than one row is a kernel of its own, as in the table above. Or it is begun by the GEMM
that adds to `hidden` and ended by the one after it (gemm_kernels.py). On an H200, whole
decode steps of a 4B model at 850 tokens in CUDA graphs then take so much more (microseconds):

    rows       2    16    32    50    64
            +204   -29  -118  -249  -188
"""

from __future__ import annotations

import logging
from typing import TypedDict, TypeGuard

import torch
import triton
from triton.errors import TritonError
from triton.tools.tensor_descriptor import TensorDescriptor

from tasuki.device_limits import limits_of
from tasuki.models import gemm_tiles, kernels, library_gemm
from tasuki.models.gemm_kernels import AHEAD, AHEAD_OF_ONE, few_rows, one_row
from tasuki.models.gemm_tiles import (
    OUTS,
    Device,
    Shape,
    held_rows,
    row_groups,
    tiles_of,
)
from tasuki.models.layers import PlainLinear
from tasuki.models.ops import Weighted
from tasuki.overlap import overlaps

log = logging.getLogger(__name__)

MAX_ROWS = 64
LIMIT_ROWS = 128
MIN_ROWS_WEIGHTED = 16

_OUTS_OF_ONE, _COLUMNS_OF_ONE = 4, 512
_HALF = (torch.bfloat16, torch.float16)
_MAX_TILES = 8192  # of a gemm: rows of the largest weight / OUTS
_WEIGHTED = (torch.bfloat16,)  # float16 has no room for what is not normed
_MAX_STRETCHES = 128  # beyond these sums of squares would not stay in registers


class _Surroundings(TypedDict):
    """What surrounds a GEMM; see `library_gemm.multiply`."""

    norm: torch.Tensor | None
    gated: bool
    added: bool
    squares: torch.Tensor | None
    left: Weighted | None


class FewRows:
    """GEMMs of up to MAX_ROWS rows on one device, of one stream at a time.

    Owns the counters by which the programs of a divided GEMM find out who is last;
    they are 0 between kernels.

    Attributes:
        refused: Whether the device refused a kernel: none is launched any more.
    """

    def __init__(self, eps: float, device: torch.device) -> None:
        """Norm with `eps`."""
        self._eps = eps
        limits = limits_of(device)
        self._dependent = overlaps(device)
        self._shared_bytes = limits.shared_bytes
        self._counters = torch.zeros(_MAX_TILES, dtype=torch.int32, device=device)
        self.refused = False
        self._has_tma = limits.has_tma
        self._programs = limits.cores if device.type == "cuda" else 1

    def takes(self, gemm: object, rows: int, most_rows: int = MAX_ROWS) -> TypeGuard[PlainLinear]:
        """Whether the methods below take a GEMM of so many rows.

        Args:
            gemm: A linear layer.
            rows: Of its input.
            most_rows: Up to `LIMIT_ROWS`; beyond `MAX_ROWS` they are rarely the fastest.
        """
        if self.refused or not isinstance(gemm, PlainLinear) or not 0 < rows <= most_rows:
            return False
        if rows == 1:
            return takes_one_row(gemm.weight)
        out, size = gemm.weight.shape
        half = gemm.weight.dtype in _HALF
        return half and size % gemm_tiles.COLUMNS == 0 and out <= _MAX_TILES * OUTS

    def plain(self, gemm: PlainLinear, x: torch.Tensor) -> torch.Tensor:
        """The GEMM of `x`, [rows, in] with adjacent elements."""
        result = torch.empty(x.shape[0], gemm.weight.shape[0], dtype=x.dtype, device=x.device)
        self._run(gemm, x, result)
        return result

    def normed(
        self, gemm: PlainLinear, x: torch.Tensor | Weighted, norm: torch.Tensor
    ) -> torch.Tensor:
        """The GEMM of `x`, [rows, in] with adjacent elements, after `kernels.norm`.

        Where `x` is weighted, it is so with `norm`.
        """
        return self._normed(gemm, x, norm, gemm.weight.shape[0])

    def gated(
        self, gemm: PlainLinear, x: torch.Tensor | Weighted, norm: torch.Tensor | None
    ) -> torch.Tensor:
        """`kernels.gated` of `normed`: [rows, in] to [rows, out / 2]; no bias.

        Without `norm` `x` is normed already.
        """
        assert gemm.bias is None
        return self._normed(gemm, x, norm, gemm.weight.shape[0] // 2, gated=True)

    def add(
        self,
        gemm: PlainLinear,
        x: torch.Tensor,
        hidden: torch.Tensor,
        norm: torch.Tensor | None = None,
    ) -> Weighted | None:
        """Add the GEMM of `x`, [rows, in] with adjacent elements, to `hidden` in place.

        Returns:
            `hidden` weighted with `norm`; None: without one, or of rows that are not weighted.
        """
        left = None if norm is None else _room(hidden)
        self._run(gemm, x, hidden, norm=norm, added=True, left=left)
        return left

    def _normed(
        self,
        gemm: PlainLinear,
        x: torch.Tensor | Weighted,
        norm: torch.Tensor | None,
        out: int,
        *,
        gated: bool = False,
    ) -> torch.Tensor:
        squares = None
        if isinstance(x, Weighted):
            rows, squares = x.x, x.squares
        elif norm is None or x.shape[0] == 1:
            rows = x
        else:
            rows = kernels.norm(x, norm, self._eps)
        result = rows.new_empty(rows.shape[0], out)
        self._run(gemm, rows, result, norm=norm, gated=gated, squares=squares)
        return result

    def _run(
        self,
        gemm: PlainLinear,
        x: torch.Tensor,
        result: torch.Tensor,
        *,
        norm: torch.Tensor | None = None,
        gated: bool = False,
        added: bool = False,
        squares: torch.Tensor | None = None,
        left: Weighted | None = None,
    ) -> None:
        """Launch the kernel; where the device refuses it, PyTorch's operators from now on."""
        surroundings: _Surroundings = {
            "norm": norm,
            "gated": gated,
            "added": added,
            "squares": squares,
            "left": left,
        }
        if not self.refused:
            try:
                return self._launch(gemm, x, result, **surroundings)
            except TritonError as error:  # before anything ran: it does not fit, or compile
                self.refused = True
                first = " ".join(str(error).split())[-400:]
                log.warning(
                    "our kernels of few rows do not run on this GPU (%s): %s; cuBLAS takes over",
                    type(error).__name__,
                    first,
                )
        library_gemm.multiply(gemm, x, result, self._eps, **surroundings)

    def _launch(
        self,
        gemm: PlainLinear,
        x: torch.Tensor,
        result: torch.Tensor,
        *,
        norm: torch.Tensor | None = None,
        gated: bool = False,
        added: bool = False,
        squares: torch.Tensor | None = None,
        left: Weighted | None = None,
    ) -> None:
        rows, size = x.shape
        out = result.shape[1]
        shared = {
            "biased": gemm.bias is not None,
            "gated": gated,
            "added": added,
            "dependent": self._dependent,
            "launch_pdl": self._dependent,
        }
        bias = x if gemm.bias is None else gemm.bias
        if rows == 1:
            normed = norm is not None and not added
            ends = (bias, result, out, self._eps)
            self._launch_one(x, norm if normed else None, gemm.weight, ends, shared)
            return
        weight, none = gemm.weight, self._counters  # what is not there, and not read
        has_tma = self._has_tma and _is_aligned(x, weight)
        device = Device(self._shared_bytes, self._programs, has_tma)
        tiles = tiles_of(Shape(rows, size, out, gated), device)
        count = triton.cdiv(out, tiles.outs)
        sums = count * tiles.split * tiles.outs * held_rows(rows) * (1 + gated)
        first, second = row_groups(rows)
        few_rows[(count * tiles.split,)](
            x,
            x.stride(0),
            _blocks(x, first, tiles),
            _blocks(x, second, tiles),
            none if squares is None else squares,
            weight,
            _blocks(weight, tiles.outs, tiles),
            bias,
            result,
            result.stride(0),
            weight if norm is None else norm,
            x if left is None else left.x,
            none if left is None else left.squares,
            x.new_empty(sums if tiles.split > 1 else 0, dtype=torch.float32),
            self._counters,
            rows,
            out,
            self._eps,
            size=size,
            split=tiles.split,
            stretches=0 if squares is None else squares.shape[0],
            weighing=left is not None,
            first=first,
            second=second,
            outs=tiles.outs,
            columns=tiles.columns,
            stages=tiles.stages,
            ahead=AHEAD,
            num_warps=tiles.warps,
            **shared,
        )

    def _launch_one(
        self,
        x: torch.Tensor,
        norm: torch.Tensor | None,
        weight: torch.Tensor,
        ends: tuple[torch.Tensor, torch.Tensor, int, float],
        shared: dict[str, bool],
    ) -> None:
        """The kernel of one row; `ends`: bias, result, its columns, and the norm's eps."""
        size, out = x.shape[1], ends[2]
        normed = norm is not None
        norm = x if norm is None else norm
        one_row[(triton.cdiv(out, _OUTS_OF_ONE),)](
            x,
            norm,
            weight,
            *ends,
            size=size,
            normed=normed,
            outs=_OUTS_OF_ONE,
            columns=_COLUMNS_OF_ONE,
            stages=1 if normed else 5,
            ahead=AHEAD_OF_ONE,
            num_warps=2,
            **shared,
        )


def _is_aligned(*tensors: torch.Tensor) -> bool:
    """Whether rows begin where a description of blocks may: at multiples of 16 bytes."""
    return all(
        tensor.data_ptr() % 16 == 0 and tensor.stride(0) * tensor.element_size() % 16 == 0
        for tensor in tensors
    )


def _blocks(tensor: torch.Tensor, rows: int, tiles: gemm_tiles.Tiles) -> TensorDescriptor | None:
    """Describes blocks of so many rows and a step's columns; None: there are none."""
    if not tiles.in_blocks or rows == 0:
        return None
    return TensorDescriptor.from_tensor(tensor, [rows, tiles.columns])


def takes_one_row(weight: torch.Tensor) -> bool:
    """Whether `FewRows` takes GEMMs of one row by `weight`, [out, in]."""
    return weight.shape[1] % _COLUMNS_OF_ONE == 0


def _room(hidden: torch.Tensor) -> Weighted | None:
    """For `hidden` weighted; None: it is better not, or cannot be."""
    rows, out = hidden.shape
    tiles = triton.cdiv(out, OUTS)
    if rows < MIN_ROWS_WEIGHTED or hidden.dtype not in _WEIGHTED or tiles > _MAX_STRETCHES:
        return None
    squares = hidden.new_empty(tiles, sum(row_groups(rows)), dtype=torch.float32)
    return Weighted(hidden.new_empty(rows, out), squares)
