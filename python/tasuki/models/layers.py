"""GEMMs with a fixed weight, as fast as this machine does them.

On the CPU a weight is repacked once into oneDNN's blocked layout. Measured with
torch 2.15 on two Zen 5 cores and the GEMMs of a 135M model (a whole step,
milliseconds, plain -> packed):

    rows    float32        bfloat16
       1     25.1 ->  12.9    7.1 ->   7.3
       8     39.5 ->  14.8   11.4 ->   8.2
      32     64.8 ->  25.7   17.8 ->  14.5
     512    495.6 -> 214.9  115.0 -> 112.0

Elsewhere, or where the operators are not there or answer wrongly, it is
`torch.nn.functional.linear`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F  # noqa: N812

from tasuki.execution.collective import Collective

Linear = Callable[[Any], torch.Tensor]
"""[T, in], of fp8 rounded or not, to [T, out], T at least 1, in the weight's dtype."""


@runtime_checkable
class Placed(Protocol):
    """A GEMM that can write where it is told."""

    @property
    def outs(self) -> int:
        """Columns of the result."""

    def __call__(self, x: Any) -> torch.Tensor:
        """See `Linear`."""

    def into(self, out: torch.Tensor, x: Any) -> torch.Tensor:
        """Write the GEMM to `out`, [T, out], and return it."""


@dataclass(frozen=True, slots=True)
class PlainLinear:
    """A GEMM whose weight, [out, in], is as it was given, so that others may use it."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    @property
    def outs(self) -> int:
        """See `Placed`."""
        return self.weight.shape[0]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See `Linear`."""
        return F.linear(x, self.weight, self.bias)

    def into(self, out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """See `Placed`."""
        if self.bias is None:
            return torch.mm(x, self.weight.t(), out=out)
        return torch.addmm(self.bias, x, self.weight.t(), out=out)


_EXACT_ROWS = 16
_PACKED_FOR_ROWS = 256  # layout for this many rows was the fastest at 1, 8 and 512 as well


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """Prepare a GEMM with `weight`, which the result may or may not share memory with.

    Args:
        weight: [out, in].
        bias: [out] or None.
    """
    if weight.device.type == "cpu" and _packing_works(weight.dtype):
        return _packed(weight, bias)
    return PlainLinear(weight, bias)


def make_head(weight: torch.Tensor) -> Linear:
    """As `make_linear`, but the result is float32: logits.

    On CUDA the GEMM of 16-bit numbers leaves its float32 sums as they are;
    a rounded result would cost another pass over it.
    """
    if weight.is_cuda and weight.dtype in (torch.bfloat16, torch.float16):

        def unrounded(x: torch.Tensor) -> torch.Tensor:
            return torch.mm(x, weight.t(), out_dtype=torch.float32)

        return unrounded
    gemm = make_linear(weight)
    return lambda x: gemm(x).float()


@dataclass(frozen=True, slots=True)
class SummedLinear:
    """The sum of a GEMM over the ranks, each of which has part of its columns: `part`."""

    part: Linear
    collective: Collective

    def __call__(self, x: Any) -> torch.Tensor:
        """See `Linear`, of rows that `part` takes; the result is valid until the next sum."""
        part = self.part
        if isinstance(part, Placed):
            place = self.collective.place(x.shape[0], part.outs, x.dtype)
            if place is not None:
                return self.collective.all_reduce(part.into(place, x))
        return self.collective.all_reduce(part(x))


def summed(gemm: Linear, collective: Collective) -> Linear:
    """The sum of a GEMM over the ranks, if there are several."""
    return gemm if collective.size == 1 else SummedLinear(gemm, collective)


def _packed(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    gemm = torch.ops.mkldnn._linear_pointwise.default
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)

    def run(x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        padding = padded_rows(rows) - rows
        if padding:
            x = F.pad(x, (0, 0, 0, padding))
        result: torch.Tensor = gemm(x, packed, bias, "none", [], "")
        return result[:rows] if padding else result

    return run


def padded_rows(rows: int) -> int:
    """The row count that a GEMM of `rows` rows is computed with.

    oneDNN compiles a kernel for every row count it meets, takes as long for it
    as for the GEMM itself and keeps about 1 MB of each, 1024 of them. Prefill
    steps are of every length, so few counts are used: every one up to 16, then
    four to an octave, then, above 128, eight: 44 of them up to 512.
    """
    if rows <= _EXACT_ROWS:
        return rows
    step: int = 1 << ((rows - 1).bit_length() - 3)
    if step > _EXACT_ROWS:
        step //= 2
    return -(-rows // step) * step


@functools.cache
def _packing_works(dtype: torch.dtype) -> bool:
    """Whether oneDNN's packed GEMM is there and agrees with the plain one.

    The operators are what torch's own compiler emits, but not documented API:
    hence the trial.
    """
    if dtype not in (torch.float32, torch.bfloat16):
        return False
    try:
        with torch.inference_mode():
            weight = (torch.arange(48 * 32, dtype=torch.float32) % 13 - 6).view(48, 32).to(dtype)
            bias = torch.arange(48, dtype=torch.float32).to(dtype)
            run = _packed(weight, bias)
            for rows in (1, 5):
                x = (torch.arange(rows * 32, dtype=torch.float32) % 7 - 3).view(rows, 32).to(dtype)
                if not torch.allclose(run(x), F.linear(x, weight, bias), rtol=0.01, atol=0.01):
                    return False
    except (RuntimeError, AttributeError, TypeError):
        return False
    return True
