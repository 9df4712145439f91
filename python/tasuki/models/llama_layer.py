"""The weights of one Llama layer, as whoever computes it takes them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tasuki.models.experts import Experts
from tasuki.models.layers import Linear

Norms = tuple[torch.Tensor, torch.Tensor]
"""Weights [head_dim] of the queries' and the keys' norm."""


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
