"""Which attention a model runs with over a pool."""

from __future__ import annotations

import torch

from tasuki.attention.base import AttentionBackend
from tasuki.attention.pool_only import PoolOnly
from tasuki.attention.select import make_attention
from tasuki.models.base import CausalModel
from tasuki.models.llama_cpu import CpuLlamaModel


def attention_for(
    model: CausalModel, pool: torch.Tensor, dtype: torch.dtype
) -> tuple[AttentionBackend, str]:
    """The fastest attention for a model.

    Args:
        model: What will call it; as much of the model as this rank has.
        pool: [num_blocks, kv_heads, layers, 2, block_size, head_dim].
        dtype: the model's.

    Returns:
        The backend, and the choice in one line for the log.

    Raises:
        AttentionError: There is none; see `make_attention`.
    """
    if isinstance(model, CpuLlamaModel):
        return PoolOnly(pool), "attention: part of the model's kernels"
    return make_attention(pool, model.spec.num_heads, dtype, model.spec.sliding_windows)
