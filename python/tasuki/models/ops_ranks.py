"""CUDA's steps where several ranks divide the model: sums over them together with norms."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tasuki.engine.collective import SumNorm
from tasuki.models.layers import Linear, SummedLinear
from tasuki.models.ops_cuda import CudaOps
from tasuki.models.spec import ModelSpec

if TYPE_CHECKING:
    from tasuki.models.llama import LlamaLayer


class RankedOps(CudaOps):
    """`Ops` of one rank of several; see models/ops.py."""

    def __init__(self, spec: ModelSpec, device: torch.device, sums: SumNorm) -> None:
        """Prepare for a model of this shape, the rank's part of it."""
        super().__init__(spec, device)
        self._eps, self._sums = spec.norm_eps, sums

    def rest(
        self, layer: LlamaLayer, hidden: torch.Tensor, attended: torch.Tensor, norm: torch.Tensor
    ) -> torch.Tensor | None:
        """See `Ops.rest`."""
        if not self._sums.takes(hidden.shape[0]):
            return super().rest(layer, hidden, attended, norm)
        output, down = _part(layer.output), _part(layer.down)
        normed = self._sums(hidden, output(attended), layer.mlp_norm, self._eps)
        inner = self.gated(layer.gate_up(normed))
        return self._sums(hidden, down(inner), norm, self._eps)


def _part(product: Linear) -> Linear:
    """This rank's, not summed."""
    assert isinstance(product, SummedLinear)
    return product.part
