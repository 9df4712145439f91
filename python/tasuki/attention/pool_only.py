"""The pool alone, for a model whose own kernels attend (models/llama_cpu.py)."""

from __future__ import annotations

import torch

from tasuki.attention.batch import Batch
from tasuki.attention.errors import AttentionError
from tasuki.attention.kv_scales import UNSCALED


class PoolOnly:
    """`AttentionBackend` that plans nothing and attends for nobody; see attention/base.py."""

    capturable = False
    captures_prompts = False

    def __init__(self, pool: torch.Tensor) -> None:
        """Carry `pool`, [num_blocks, kv_heads, layers, 2, block_size, head_dim]."""
        self.pool, self.scales = pool, UNSCALED

    def plan(self, batch: Batch) -> None:
        """Nothing: the model's kernels read the batch themselves."""

    def forward(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        sliding_window: int | None = None,
        written: bool = False,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Refuse.

        Raises:
            AttentionError: Always: whoever calls this has been given the wrong backend.
        """
        raise AttentionError(
            f"layer {layer} asks for attention, but its model attends by kernels of its own"
        )
