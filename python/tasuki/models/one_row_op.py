"""GEMMs of models that we did not write: of a single row, under torch.compile, our own kernel.

On an H200 the kernels that the compiler makes and tunes read the weights of a 4B model at
62% of the speed of a copy, `gemm_kernels.one_row` at 71%. As an operator that kernel is
opaque to the compiler, and the choice is made while it traces: a graph for one token has
it, a graph for many has not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from tasuki.models.layers import PlainLinear

if TYPE_CHECKING:
    from tasuki.models.gemms import FewRows

Gemm = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""Like `F.linear`: x [..., in], weight [out, in], bias [out] or None, to [..., out]."""

_DEVICES = ("cuda",)


class Linear(nn.Linear):
    """`nn.Linear` for a weight that the kernel takes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features]."""
        return _gemm(x, self.weight, self.bias)


def gemm_with(weight: torch.Tensor) -> Gemm:
    """What to multiply by `weight` with: `F.linear` where the kernel does not take it."""
    if weight.device.type not in _DEVICES:
        return F.linear
    from tasuki.models.gemms import takes_one_row  # imports Triton, which others may lack

    return _gemm if takes_one_row(weight) else F.linear


def _gemm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if torch.compiler.is_compiling() and x.numel() == x.shape[-1]:
        gemm: torch.Tensor = torch.ops.tasuki.one_row(x, weight, bias)
        return gemm
    return F.linear(x, weight, bias)


@torch.library.custom_op("tasuki::one_row", mutates_args=())
def _run(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    result: torch.Tensor = _few_rows(x.device).plain(PlainLinear(weight, bias), x.reshape(1, -1))
    return result.view(*x.shape[:-1], -1)


@_run.register_fake
def _shape(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@functools.cache
def _few_rows(device: torch.device) -> FewRows:
    from tasuki.models.gemms import FewRows  # as above

    return FewRows(0.0, device)
