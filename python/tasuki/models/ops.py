"""A Llama layer's weights, and its steps around the GEMMs: what differs from device to device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from tasuki.attention.base import AttentionBackend
from tasuki.attention.batch import Batch
from tasuki.models.experts import Experts
from tasuki.models.layers import Linear

Norms = tuple[torch.Tensor, torch.Tensor]
"""Weights [head_dim] of the queries' and the keys' norm."""
Rotation = tuple[torch.Tensor, torch.Tensor]
"""What `Ops.rotation` gives and `Ops.attend` takes; its meaning is the implementation's."""


@dataclass(frozen=True, slots=True)
class DenseMlp:
    """An MLP that every token passes; `gate_up` gives the gates' columns first."""

    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class LlamaLayer:
    """GEMMs and norms; `attention_norm` and `mlp_norm` are [hidden]."""

    attention_norm: torch.Tensor
    qkv: Linear
    head_norms: Norms | None
    output: Linear
    mlp_norm: torch.Tensor
    mlp: DenseMlp | Experts


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


Ahead = torch.Tensor | Weighted | Addend | None
"""What `Ops.rest` leaves for what comes next: `hidden` normed, or on its way there, or nothing."""


class Ops(ABC):
    """T tokens; tensors of the model's dtype and device.

    `hidden`, [T, hidden], is what the layers add to. Each GEMM's input is `hidden`
    normed, which is made where it was last added to, if not by the GEMM itself.
    """

    def qkv(self, layer: LlamaLayer, hidden: torch.Tensor, ahead: Ahead) -> torch.Tensor:
        """Queries, keys and values, [T, (heads + 2 x kv_heads) x head_dim].

        Args:
            layer: whose.
            hidden: what the layers before it made.
            ahead: what `rest` of the layer before gave; None in the first one.
        """
        return layer.qkv(self.normed(hidden, layer.attention_norm, ahead))

    def normed(self, hidden: torch.Tensor, weight: torch.Tensor, ahead: Ahead) -> torch.Tensor:
        """`norm` of `hidden`, which may be there already: `ahead`, that `rest` gave for it."""
        return ahead if isinstance(ahead, torch.Tensor) else self.norm(hidden, weight)

    def rest(
        self, layer: LlamaLayer, hidden: torch.Tensor, attended: torch.Tensor, norm: torch.Tensor
    ) -> Ahead:
        """What follows attention: its output and the MLP, added to `hidden` in place.

        Returns:
            For the norm whose weight is `norm`, that of what comes next.
        """
        normed = self.add_norm(hidden, layer.output(attended), layer.mlp_norm)
        mlp = layer.mlp
        if isinstance(mlp, Experts):
            return self.add_norm(hidden, mlp(normed, self.gated), norm)
        return self.add_norm(hidden, mlp.down(self.gated(mlp.gate_up(normed))), norm)

    @abstractmethod
    def rotation(self, batch: Batch) -> Rotation:
        """What the rotation of this step's tokens needs; once a step."""

    @abstractmethod
    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """[T, hidden] normalised by root mean square, times `weight` [hidden]."""

    @abstractmethod
    def add_norm(self, hidden: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Add `x` to `hidden` in place; return the norm of the sum, all [T, hidden]."""

    @abstractmethod
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

    @abstractmethod
    def gated(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[T, 2 x inner] to silu(first half) x second half, [T, inner]; may overwrite."""
