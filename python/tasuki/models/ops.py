"""The steps of a Llama layer between its products: what differs from device to device."""

from __future__ import annotations

from typing import Protocol

import torch

from tasuki.attention.base import AttentionBackend
from tasuki.engine.batch import Batch
from tasuki.models.spec import ModelSpec

Rotation = tuple[torch.Tensor, torch.Tensor]
"""What `Ops.rotation` gives and `Ops.attend` takes; its meaning is the implementation's."""

Norms = tuple[torch.Tensor, torch.Tensor]
"""Weights [head_dim] of the queries' and the keys' norm."""


class Ops(Protocol):
    """Everything but the products. T tokens; tensors of the model's dtype and device."""

    def rotation(self, batch: Batch) -> Rotation:
        """What the rotation of this step's tokens needs; once a step."""

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """[T, hidden] normalised by root mean square, times `weight` [hidden]."""

    def add_norm(self, hidden: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Add `x` to `hidden` in place; return the norm of the sum, all [T, hidden]."""

    def attend(
        self,
        layer: int,
        qkv: torch.Tensor,
        norms: Norms | None,
        rotation: Rotation,
        batch: Batch,
        attention: AttentionBackend,
    ) -> torch.Tensor:
        """Norm and rotate queries and keys, write the cache, attend.

        Args:
            layer: its index.
            qkv: [T, (heads + 2 x kv_heads) x head_dim]; overwritten.
            norms: of queries and keys, if the model has them.
            rotation: of this step.
            batch: the step.
            attention: planned for it.

        Returns:
            [T, heads x head_dim].
        """

    def gated(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[T, 2 x inner] to silu(first half) x second half, [T, inner]; may overwrite."""


def make_ops(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> Ops:
    """The implementation for a device: fused kernels on CUDA, PyTorch's operators elsewhere."""
    if device.type == "cuda":
        from tasuki.models.ops_cuda import CudaOps

        return CudaOps(spec, device)
    from tasuki.models.ops_torch import TorchOps

    return TorchOps(spec, dtype, device)
