"""Attention of one group of queries at a time, over keys and values that lie together.

The query heads that share a KV head are rows of one query matrix, so K and V are
never repeated. Of PyTorch's two ways, its fused kernel and plain matrix
GEMMs, each call takes the one that is faster. Measured with torch 2.15 on one
Zen 5 core, 9 heads over 3 KV heads of dimension 64 (microseconds, fused / GEMMs):

                        float32         bfloat16
    1 decode x 160       14 / 14          19 / 35
    8 decodes x 160      99 / 86         123 / 69
    8 decodes x 1024    791 / 492        707 / 251
    128 tokens x 128    500 / 453        574 / 256
    256 tokens x 256   1837 / 2910      1930 / 785
    256 tokens x 1024  7180 / 11730     7913 / 2918

In bfloat16 the GEMMs round the scores, as transformers' "eager" attention
does. This file owns no state.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

# GEMMs hold all scores at once; above this many the fused kernel is taken.
_MOST_SCORES = 1 << 25


def attend_decodes(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """One query token of each of S sequences.

    Args:
        query: [S, heads, head_dim].
        keys, values: [S, kv_heads, L, head_dim].
        mask: [S, 1, 1, L] added to the scores, or None.
        scale: factor on the scores.

    Returns:
        [S, heads, head_dim].
    """
    count, kv_heads, length, head_dim = keys.shape
    grouped = query.view(count, kv_heads, -1, head_dim)
    if count == 1 or not keys.is_cpu:
        attended = F.scaled_dot_product_attention(grouped, keys, values, mask, scale=scale)
        return attended.reshape(query.shape)
    flat = (count * kv_heads, -1, head_dim)
    if mask is not None:
        mask = mask.expand(-1, kv_heads, -1, -1).reshape(-1, 1, length)
    attended = _gemms(grouped.reshape(flat), keys.view(flat), values.view(flat), mask, scale)
    return attended.view(query.shape)


def attend_chunk(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """T query tokens of one sequence.

    Args:
        query: [T, heads, head_dim].
        keys, values: [kv_heads, L, head_dim].
        mask: [T, L] added to the scores; None: L is T, plainly causal.
        scale: factor on the scores.

    Returns:
        [T, heads, head_dim].
    """
    tokens, heads, head_dim = query.shape
    kv_heads, length, _ = keys.shape
    # [kv_heads, heads that share it, T, head_dim]
    grouped = query.view(tokens, kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    share = grouped.shape[1]
    few = tokens * heads * length <= _MOST_SCORES
    if keys.is_cpu and query.dtype == torch.bfloat16 and few:
        if mask is None:
            mask = causal_mask(tokens, length, None, query)
        flat = grouped.reshape(kv_heads, share * tokens, head_dim)
        attended = _gemms(flat, keys, values, mask.repeat(share, 1)[None], scale)
        attended = attended.view(kv_heads, share, tokens, head_dim)
    else:
        attended = F.scaled_dot_product_attention(
            grouped,
            keys[:, None].expand(-1, share, -1, -1),
            values[:, None].expand(-1, share, -1, -1),
            mask,
            is_causal=mask is None,
            scale=scale,
        )
    return attended.permute(2, 0, 1, 3).reshape(query.shape)


def causal_mask(tokens: int, length: int, window: int | None, like: torch.Tensor) -> torch.Tensor:
    """What the last `tokens` of `length` tokens see, added to scores: 0 or -inf.

    Args:
        window: tokens that each sees, itself included; None: all before it.
        like: gives dtype and device.

    Returns:
        [tokens, length].
    """
    queries = torch.arange(length - tokens, length, device=like.device)[:, None]
    keys = torch.arange(length, device=like.device)
    hidden = keys > queries
    if window is not None:
        hidden |= keys <= queries - window
    return additive(hidden, like)


def additive(hidden: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A mask to add to scores: -inf where `hidden`, else 0; dtype and device of `like`."""
    zeros = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device)
    return zeros.masked_fill_(hidden, float("-inf"))


def _gemms(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """[N, rows, head_dim] from the same and [N, L, head_dim]; mask broadcasts to scores."""
    beta = 1.0
    if mask is None:
        mask, beta = query.new_zeros(1, 1, 1), 0.0
    scores = torch.baddbmm(mask, query, keys.transpose(1, 2), beta=beta, alpha=scale)
    return torch.bmm(torch.softmax(scores, -1), values)
