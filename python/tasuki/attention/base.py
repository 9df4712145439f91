"""The border between the engine, models and attention kernels.

A step goes: the runner builds the batch, calls `plan`, and then the model's
forward, which calls the rest once a layer. CUDA graphs hold the forward alone:

    outside of the graph    fill the static tensors, `plan(batch)`
    inside                  `model.forward(batch, attention)`, sampling

The same model runs once outside of a capture before the first one: kernels are
compiled then, and what its layers ask for (windows, scales) becomes known.
`plan` of a batch with a `bucket` or with `limits` writes to buffers that stay where
they are for that bucket or those limits, so that a graph captured after one plan is
right after any other plan of the same; the first plan of limits is of as many tokens
as they allow. It launches on the current stream and waits for nothing;
on the host it reads only the batch's lists, on the device whatever it likes: a
decode's length is its position and one. Everything that it shares with a
step still running is kept twice: `plan` for step n + 1 may run on the host
while step n runs on the device, if step n - 1 has ended.
"""

from __future__ import annotations

from typing import Protocol

import torch

from tasuki.attention.batch import Batch
from tasuki.attention.kv_scales import KvScales


class AttentionBackend(Protocol):
    """Attention over the paged cache of one worker.

    Built with the pool `[num_blocks, kv_heads, layers, 2, block_size, head_dim]`
    (see kv/layout.py). The runner calls `plan` once a step, the model `forward`
    once a layer.

    Attributes:
        pool: the pool; a model whose kernels write keys and values themselves
            writes there.
        capturable: whether `forward` may be captured in a CUDA graph; if not,
            no batch has a `bucket`.
        captures_prompts: whether it may for steps with prompts too; if not, no batch
            has `limits`.
        scales: of an fp8 pool's keys and values; a model whose kernels write them
            themselves divides by them.
    """

    pool: torch.Tensor
    scales: KvScales
    capturable: bool
    captures_prompts: bool

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
        written: bool = False,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write key and value to their slots, then attend causally.

        Between a `plan` and the next it launches the same kernels with the same
        arguments whatever the batch's lists hold, if the batch has a `bucket` or `limits`.

        A `capturable` backend takes more rows than the batch's lists name: the rest is
        padding and left alone.

        Args:
            layer: index of the layer in the pool; of the model, where groups of layers share it
                (by_group.py).
            query: [T, heads, head_dim], the model's dtype.
            key, value: [T, kv_heads, head_dim], the model's dtype.
            scale: factor on the scores.
            sliding_window: tokens each query sees, itself included; None: all.
            written: key and value are in their slots already.
            out: where the result goes, contiguous; None: to new memory.

        Returns:
            [T, heads, head_dim].
        """
