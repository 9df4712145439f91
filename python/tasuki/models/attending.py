"""Which attention a model runs with over a pool."""

from __future__ import annotations

import torch

from tasuki.attention.base import AttentionBackend
from tasuki.attention.by_group import AttentionByGroup
from tasuki.attention.kv_scales import UNSCALED, KvScales
from tasuki.attention.pool_only import PoolOnly
from tasuki.attention.select import make_attention
from tasuki.engine.cache_groups import CacheGroup, group_layers
from tasuki.models.base import CausalModel
from tasuki.models.llama_cpu import CpuLlamaModel
from tasuki.models.spec import ModelSpec


def attention_for(
    model: CausalModel,
    pool: torch.Tensor,
    dtype: torch.dtype,
    scales: KvScales = UNSCALED,
) -> tuple[AttentionBackend, str]:
    """The fastest attention for a model.

    Args:
        model: What will call it; as much of the model as this rank has.
        pool: [num_blocks, kv_heads, layers, planes, block_size, head_dim].
        dtype: the model's.
        scales: of an fp8 pool.

    Returns:
        The backend, and the choice in one line for the log.

    Raises:
        AttentionError: There is none; see `make_attention`.
    """
    if isinstance(model, CpuLlamaModel):
        return PoolOnly(pool), "attention: part of the model's kernels"
    spec, groups = model.spec, cache_groups(model.spec)
    if len(groups) == 1:
        return make_attention(pool, spec.num_heads, dtype, spec.sliding_windows, scales)
    made = [make_attention(pool, spec.num_heads, dtype, [group.window]) for group in groups]
    return AttentionByGroup(groups, [backend for backend, _ in made]), made[0][1]


def cache_groups(spec: ModelSpec) -> tuple[CacheGroup, ...]:
    """What the layers of a model keep.

    The fast path's kernels write a step's KV through one block table: there layers that keep
    different parts keep all.
    """
    windows = spec.sliding_windows
    if spec.native and len(set(windows)) > 1:
        windows = (None,) * spec.num_layers
    return group_layers(windows, latent=spec.latent_rank is not None)
