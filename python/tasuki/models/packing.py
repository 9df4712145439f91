"""GEMMs of one input as a single GEMM, in models that we did not write.

Modules of transformers multiply the same hidden states by three matrices, then by
two. One GEMM of all their columns reads its input once and fills the device
better: at few rows that is a tenth of a decode step. Weights are put together
once; modules in the old ones' places hand out their parts of the GEMM.

A part is taken from the last GEMM if it was of the very same tensor. Under
torch.compile that is decided while tracing: what is left is one GEMM. All GEMMs,
packed or not, are those of `one_row_op`. Runs on the engine thread.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from tasuki.models.one_row_op import Linear, gemm_with

# Names under which modules hold GEMMs of one input.
_GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class _Gemm:
    """The GEMM of several `Linear`s, and the input and parts of the last one until taken."""

    def __init__(self, linears: list[nn.Linear]) -> None:
        self.weight = torch.cat([linear.weight.detach() for linear in linears])
        biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
        self.bias = torch.cat(biases) if biases else None
        self.sizes = [linear.out_features for linear in linears]
        self._multiply = gemm_with(self.weight)
        self._input: torch.Tensor | None = None
        self._parts: tuple[torch.Tensor, ...] = ()

    def part(self, x: torch.Tensor, index: int) -> torch.Tensor:
        """Columns of `linears[index]`, [..., out_features]."""
        if self._input is not x:
            self._input = x
            gemm = self._multiply(x, self.weight, self.bias)
            self._parts = torch.split_with_sizes(gemm, self.sizes, -1)
        part = self._parts[index]
        if index == len(self.sizes) - 1:
            self._input, self._parts = None, ()
        return part


class _Part(nn.Module):
    """What stands where a `Linear` stood."""

    def __init__(self, gemm: _Gemm, index: int) -> None:
        super().__init__()
        self._gemm = gemm
        self._index = index
        first = sum(gemm.sizes[:index])
        rows = slice(first, first + gemm.sizes[index])
        # Views, for whoever looks at them.
        self.weight = nn.Parameter(gemm.weight[rows], requires_grad=False)
        bias = gemm.bias
        self.bias = None if bias is None else nn.Parameter(bias[rows], requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features]."""
        return self._gemm.part(x, self._index)


def pack(module: nn.Module) -> Callable[[], None]:
    """Let GEMMs of one input be one, wherever `module` has such, and all be `one_row_op`'s.

    Returns:
        What undoes it.
    """
    packed = [
        (parent, group)
        for parent in module.modules()
        for group in _GROUPS
        if _may_pack([getattr(parent, name, None) for name in group])
    ]
    for parent, group in packed:
        gemm = _Gemm([getattr(parent, name) for name in group])
        for index, name in enumerate(group):
            setattr(parent, name, _Part(gemm, index))
    plain = [each for each in module.modules() if type(each) is nn.Linear]
    quick = [each for each in plain if gemm_with(each.weight) is not F.linear]
    for each in quick:
        each.__class__ = Linear

    def undo() -> None:
        for each in quick:
            each.__class__ = nn.Linear
        for parent, group in packed:
            for name in group:
                setattr(parent, name, _plain(getattr(parent, name)))

    return undo


def _may_pack(found: list[object]) -> bool:
    """Whether all are plain GEMMs alike but for their numbers of columns."""
    kinds = {
        (each.in_features, each.bias is None, each.weight.dtype, each.weight.device)
        if type(each) is nn.Linear
        else None
        for each in found
    }
    return len(kinds) == 1 and None not in kinds


def _plain(part: _Part) -> nn.Linear:
    """A `Linear` again, over the same memory."""
    columns, rows = part.weight.shape
    linear = nn.Linear(rows, columns, bias=part.bias is not None, device="meta")
    linear.weight = part.weight
    if part.bias is not None:
        linear.bias = part.bias
    return linear
