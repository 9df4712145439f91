"""What one GEMM leaves for the next one, where the norm between them is no kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Weighted:
    """Rows on their way through a norm: times its weight, not yet divided by their size.

    Attributes:
        x: [rows, size], contiguous, of the rows' dtype.
        squares: [stretches, rows or more] float32: of the rows before the weight, summed over
            stretches of columns.
    """

    x: torch.Tensor
    squares: torch.Tensor


@dataclass(frozen=True, slots=True)
class Addend:
    """What is still to be added to the rows, [rows, size], before they are normed."""

    x: torch.Tensor
