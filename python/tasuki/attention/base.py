"""The border between models and attention kernels."""

from __future__ import annotations

from typing import Protocol

import torch

from tasuki.engine.batch import Batch


class AttentionBackend(Protocol):
    """Attention over the paged cache of one worker.

    Built with the pool `[num_blocks, kv_heads, layers, 2, block_size, head_dim]`
    (see kv/layout.py). `plan` is called once a step, `forward` once a layer.
    """

    def plan(self, batch: Batch) -> None:
        """Prepare what every layer of this step shares."""

    def forward(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        sliding_window: int | None = None,
    ) -> torch.Tensor:
        """Write key and value to their slots, then attend causally.

        Args:
            layer: index of the layer in the pool.
            query: [T, heads, head_dim], pool dtype.
            key, value: [T, kv_heads, head_dim], pool dtype.
            scale: factor on the scores.
            sliding_window: tokens each query sees, itself included; None: all.

        Returns:
            [T, heads, head_dim].
        """
