"""Kernels that write keys and values to their slots in the pool; CUDA only.

One takes what the query-key-value GEMM gives and does all that stands before
attention in one pass: norm of queries and keys, rotation, the write to the
cache. It reads each number once; done apart these are six passes and as many
launches a layer.

    program     one token x _TILE heads, of all: queries, keys, values
    a head      low | high: the halves that the rotation pairs

Arithmetic is float32, rounded once. An fp8 pool has numbers divided by their layer's scale
(kv_scales.py), beyond +-448 as the largest. A slot of -1 writes nothing. Triton's interpreter
runs the same code on the CPU (TRITON_INTERPRET=1). This file owns no state.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tasuki.overlap import overlaps

_TILE = 16  # heads of a program


@triton.jit
def _store(target, x, mask):  # type: ignore[no-untyped-def]
    tl.store(target, _kept(target, x), mask=mask)


@triton.jit
def _kept(target, x):  # type: ignore[no-untyped-def]
    """Numbers as they are in memory; beyond the range of fp8 the largest, NaN as it is."""
    if target.dtype.element_ty == tl.float8e4nv:
        x = tl.where(x != x, x, tl.minimum(tl.maximum(x, -448.0), 448.0))
    return x.to(target.dtype.element_ty)


@triton.jit  # type: ignore[untyped-decorator]
def _rotate_and_write(  # type: ignore[no-untyped-def]
    qkv,
    token_stride,
    table,
    positions,
    query_norm,
    key_norm,
    eps,
    slots,
    pool,
    block_stride,
    head_stride,
    side_stride,
    slot_stride,
    key_scale,
    value_scale,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    half: tl.constexpr,
    block_size: tl.constexpr,
    with_norm: tl.constexpr,
    tile: tl.constexpr,
    width: tl.constexpr,
    dependent: tl.constexpr,
):
    if dependent:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * tile + tl.arange(0, tile)
    at = tl.arange(0, width)
    inside = at < half
    mask = (head < heads + 2 * kv_heads)[:, None] & inside[None, :]
    source = qkv + token * token_stride + head[:, None] * (2 * half) + at[None, :]
    low = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(source + half, mask=mask, other=0.0).to(tl.float32)
    is_query = (head < heads)[:, None]
    is_cached = (head >= heads)[:, None]
    is_value = (head >= heads + kv_heads)[:, None]
    is_turned = (head < heads + kv_heads)[:, None]

    turned_low, turned_high = low, high
    if with_norm:
        squares = tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)
        factor = tl.rsqrt(squares / (2 * half) + eps)[:, None]
        query_low = tl.load(query_norm + at, mask=inside, other=0.0).to(tl.float32)
        query_high = tl.load(query_norm + half + at, mask=inside, other=0.0).to(tl.float32)
        key_low = tl.load(key_norm + at, mask=inside, other=0.0).to(tl.float32)
        key_high = tl.load(key_norm + half + at, mask=inside, other=0.0).to(tl.float32)
        turned_low = low * factor * tl.where(is_query, query_low[None, :], key_low[None, :])
        turned_high = high * factor * tl.where(is_query, query_high[None, :], key_high[None, :])
    row = table + tl.load(positions + token) * (2 * half) + at
    cos = tl.load(row, mask=inside, other=0.0)[None, :]
    sin = tl.load(row + half, mask=inside, other=0.0)[None, :]
    new_low = tl.where(is_value, low, turned_low * cos - turned_high * sin)
    new_high = tl.where(is_value, high, turned_high * cos + turned_low * sin)
    _store(source, new_low, mask & is_turned)
    _store(source + half, new_high, mask & is_turned)

    factor = tl.where(is_value, 1.0 / value_scale, 1.0 / key_scale)
    kept_low = _kept(pool, new_low * factor)
    kept_high = _kept(pool, new_high * factor)
    if pool.dtype.element_ty == tl.float8e4nv:
        # Attention sees what is in the cache, in this step as in any later one.
        back = tl.where(is_value, value_scale, key_scale)
        _store(source, kept_low.to(tl.float32) * back, mask & is_cached)
        _store(source + half, kept_high.to(tl.float32) * back, mask & is_cached)
    slot = tl.load(slots + token + tl.zeros_like(head))  # the same for all heads
    kv_head = (head - heads) % kv_heads
    side = (head - heads) // kv_heads
    plane = (slot // block_size) * block_stride + kv_head * head_stride + side * side_stride
    target = pool + (plane + (slot % block_size) * slot_stride)[:, None] + at[None, :]
    mask = mask & is_cached & (slot >= 0)[:, None]
    tl.store(target, kept_low, mask=mask)
    tl.store(target + half, kept_high, mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _write(  # type: ignore[no-untyped-def]
    key,
    key_token_stride,
    key_head_stride,
    value,
    value_token_stride,
    value_head_stride,
    slots,
    pool,
    block_stride,
    head_stride,
    side_stride,
    slot_stride,
    key_scale,
    value_scale,
    head_dim: tl.constexpr,
    block_size: tl.constexpr,
    width: tl.constexpr,
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, width)
    slot = tl.load(slots + token + tl.zeros_like(at))  # the same for all elements
    mask = (at < head_dim) & (slot >= 0)
    plane = (slot // block_size) * block_stride + head * head_stride
    target = pool + plane + (slot % block_size) * slot_stride + at
    key_at = key + token * key_token_stride + head * key_head_stride + at
    value_at = value + token * value_token_stride + head * value_head_stride + at
    keys = tl.load(key_at, mask=mask, other=0.0).to(tl.float32) / key_scale
    values = tl.load(value_at, mask=mask, other=0.0).to(tl.float32) / value_scale
    _store(target, keys, mask)
    _store(target + side_stride, values, mask)


def rotate_and_write(
    qkv: torch.Tensor,
    rope_table: torch.Tensor,
    positions: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    slots: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    scales: tuple[float, float] = (1.0, 1.0),
) -> None:
    """Norm and rotate queries and keys in place; write keys and values to their slots.

    Of an fp8 pool keys and values in `qkv` become what the cache has.

    Args:
        qkv: [T, heads + 2 x kv_heads, head_dim] contiguous: queries, keys, values.
        rope_table: [positions, 2, head_dim / 2] float32: cosines and sines.
        positions: [T] int64.
        norms: weights [head_dim] of the queries' and the keys' norm, or None.
        eps: of the norms.
        slots: [T] int64; -1: not written.
        pool: [num_blocks, kv_heads, layers, 2, block_size, head_dim].
        layer: which layer of the pool.
        scales: of the layer's keys and values; see kv_scales.py.
    """
    tokens, rows, head_dim = qkv.shape
    kv_heads = pool.shape[1]
    query_norm, key_norm = norms if norms is not None else (qkv, qkv)
    if not tokens:
        return
    dependent = overlaps(qkv.device)
    _rotate_and_write[(tokens, triton.cdiv(rows, _TILE))](
        qkv,
        qkv.stride(0),
        rope_table,
        positions,
        query_norm,
        key_norm,
        eps,
        slots,
        pool.select(2, layer),
        *_strides(pool),
        *scales,
        heads=rows - 2 * kv_heads,
        kv_heads=kv_heads,
        half=head_dim // 2,
        block_size=pool.shape[4],
        with_norm=norms is not None,
        tile=_TILE,
        width=triton.next_power_of_2(head_dim // 2),
        dependent=dependent,
        launch_pdl=dependent,
    )


def write(
    key: torch.Tensor,
    value: torch.Tensor,
    slots: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    scales: tuple[float, float] = (1.0, 1.0),
) -> None:
    """Write `key` and `value`, [T, kv_heads, head_dim] with adjacent elements, to their slots.

    Args:
        slots: [T] int64; -1: not written.
        pool: [num_blocks, kv_heads, layers, 2, block_size, head_dim].
        layer: which layer of the pool.
        scales: of the layer's keys and values; see kv_scales.py.
    """
    tokens, kv_heads, head_dim = key.shape
    if key.stride(2) != 1 or value.stride(2) != 1:
        key, value = key.contiguous(), value.contiguous()
    if not tokens:
        return
    _write[(tokens, kv_heads)](
        key,
        key.stride(0),
        key.stride(1),
        value,
        value.stride(0),
        value.stride(1),
        slots,
        pool.select(2, layer),
        *_strides(pool),
        *scales,
        head_dim=head_dim,
        block_size=pool.shape[4],
        width=triton.next_power_of_2(head_dim),
    )


def _strides(pool: torch.Tensor) -> tuple[int, int, int, int]:
    """Elements from a block, head, K or V, and slot to the next."""
    block, head, _, side, slot, _ = pool.stride()
    return block, head, side, slot
