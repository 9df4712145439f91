"""Products of few rows with what surrounds them: which kernel, and how divided.

Measured on an H200 over the products of a 4B model's 36 layers with their norms, gates and
additions, in a CUDA graph (ms; 1.69 is the weights' bytes at the speed of a copy):

    rows     cuBLAS and our kernels between    these
       1     2.62                              1.98
       4     2.67                              2.29
      16     2.70                              2.29
      32     2.75                              2.44
      48     2.80                              2.65
      96     2.89                              3.04

With more rows what counts is that neighbours share what they read, which these kernels
cannot: that is cuBLAS's. Norms before more than one row are kernels of their own: a
tensor core's operand goes there without passing through registers.
"""

from __future__ import annotations

from typing import TypeGuard

import torch
import triton

from tasuki.models import kernels
from tasuki.models.layers import PlainLinear
from tasuki.models.product_kernels import few_rows, one_row
from tasuki.overlap import overlaps

MAX_ROWS = 64

_OUTS_OF_ONE, _COLUMNS_OF_ONE = 4, 512
_OUTS, _COLUMNS, _COLUMNS_OF_GATED = 64, 128, 64
_HALF = (torch.bfloat16, torch.float16)
_MAX_TILES = 8192  # of a product: rows of the largest weight / _OUTS


class FewRows:
    """Products of up to MAX_ROWS rows on one device, of one stream at a time.

    Owns the counters by which the programs of a divided product find out who is last;
    they are 0 between kernels.
    """

    def __init__(self, eps: float, device: torch.device) -> None:
        """Norm with `eps`."""
        self._eps = eps
        self._dependent = overlaps(device)
        self._counters = torch.zeros(_MAX_TILES, dtype=torch.int32, device=device)
        self._programs = 1
        if device.type == "cuda":
            self._programs = torch.cuda.get_device_properties(device).multi_processor_count

    def takes(self, product: object, rows: int) -> TypeGuard[PlainLinear]:
        """Whether the methods below take a product of so many rows."""
        if not isinstance(product, PlainLinear) or not 0 < rows <= MAX_ROWS:
            return False
        out, size = product.weight.shape
        if rows == 1:
            return size % _COLUMNS_OF_ONE == 0
        half = product.weight.dtype in _HALF
        return half and size % _COLUMNS == 0 and out <= _MAX_TILES * _OUTS

    def normed(self, product: PlainLinear, x: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        """The product of `x`, [rows, in] with adjacent elements, after `kernels.norm`."""
        result = x.new_empty(x.shape[0], product.weight.shape[0])
        self._run(product, x, result, norm=norm)
        return result

    def gated(self, product: PlainLinear, x: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        """`kernels.gated` of `normed`: [rows, in] to [rows, out / 2]; no bias."""
        assert product.bias is None
        result = x.new_empty(x.shape[0], product.weight.shape[0] // 2)
        self._run(product, x, result, norm=norm, gated=True)
        return result

    def add(self, product: PlainLinear, x: torch.Tensor, hidden: torch.Tensor) -> None:
        """Add the product of `x`, [rows, in] with adjacent elements, to `hidden` in place."""
        self._run(product, x, hidden, added=True)

    def _run(
        self,
        product: PlainLinear,
        x: torch.Tensor,
        result: torch.Tensor,
        *,
        norm: torch.Tensor | None = None,
        gated: bool = False,
        added: bool = False,
    ) -> None:
        rows, size = x.shape
        out = result.shape[1]
        weight, bias = product.weight, product.bias
        what = {"biased": bias is not None, "gated": gated, "added": added}
        launch = {"dependent": self._dependent, "launch_pdl": self._dependent}
        bias = weight if bias is None else bias
        if rows == 1:
            one_row[(triton.cdiv(out, _OUTS_OF_ONE),)](
                x,
                weight if norm is None else norm,
                weight,
                bias,
                result,
                out,
                self._eps,
                size=size,
                normed=norm is not None,
                outs=_OUTS_OF_ONE,
                columns=_COLUMNS_OF_ONE,
                stages=1 if norm is not None else 5,
                num_warps=2,
                **what,
                **launch,
            )
            return
        if norm is not None:
            x = kernels.norm(x, norm, self._eps)
        first, second = row_groups(rows)
        tiles = triton.cdiv(out, _OUTS)
        columns = _COLUMNS_OF_GATED if gated else _COLUMNS
        split = self._split(tiles, size // columns)
        sums = tiles * split * _OUTS * (first + second) * (1 + gated) if split > 1 else 0
        few_rows[(tiles * split,)](
            x,
            x.stride(0),
            weight,
            bias,
            result,
            result.stride(0),
            x.new_empty(sums, dtype=torch.float32),
            self._counters,
            rows,
            out,
            size=size,
            split=split,
            first=first,
            second=second,
            outs=_OUTS,
            columns=columns,
            stages=4 if gated else 6,
            num_warps=4,
            **what,
            **launch,
        )

    def _split(self, tiles: int, steps: int) -> int:
        """Parts to divide the columns into: as many as leave one program a multiprocessor."""
        split = 1
        while tiles * split * 2 <= self._programs and steps % (split * 2) == 0:
            split *= 2
        return split


def row_groups(rows: int) -> tuple[int, int]:
    """Two powers of two, the second 0 or at least 16, that hold so many rows with little waste."""
    whole = max(16, triton.next_power_of_2(rows))
    rest = max(16, triton.next_power_of_2(rows - whole // 2))
    return (whole // 2, rest) if whole >= 64 and rest < whole // 2 else (whole, 0)
