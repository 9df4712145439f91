"""Which attention a model runs with over a pool."""

from __future__ import annotations

import torch

from tasuki.attention.base import AttentionBackend
from tasuki.attention.by_group import AttentionByGroup
from tasuki.attention.kv_scales import UNSCALED, KvScales
from tasuki.attention.select import make_attention
from tasuki.attention.states import StepStates, state_bytes
from tasuki.engine.cache_groups import CacheGroup, group_layers
from tasuki.models.base import CausalModel
from tasuki.models.llama_cpu import CpuLlamaModel, PoolOnly
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
    made = [
        make_attention(pool, spec.num_heads, dtype, [group.window])
        for group in groups
        if not group.has_state
    ]
    states = None
    if spec.states:
        parts = spec.state_parts(dtype)
        states = StepStates(pool, groups, parts, pool.shape[4])
    return AttentionByGroup(groups, [backend for backend, _ in made], states), made[0][1]


def cache_groups(spec: ModelSpec, dtype: torch.dtype = torch.float32) -> tuple[CacheGroup, ...]:
    """What the layers of a model keep.

    The fast path's kernels write a step's KV through one block table: there layers that keep
    different parts keep all.

    Args:
        spec: of the model.
        dtype: that it computes in; states are of it, so their size is.
    """
    windows = {layer: spec.sliding_windows[layer] for layer in spec.kv_layers}
    if spec.native and len(set(windows.values())) > 1:
        windows = dict.fromkeys(windows)
    sizes = {layer: state_bytes(parts) for layer, parts in spec.state_parts(dtype).items()}
    return group_layers(windows, latent=spec.latent_rank is not None, state_bytes=sizes)
