"""Which backend attends over a pool."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from tasuki.attention.base import AttentionBackend
from tasuki.attention.errors import AttentionError
from tasuki.attention.sdpa import SdpaAttention

_INSTALL = "pip install 'flashinfer-python>=0.6.14'"


def make_attention(
    pool: torch.Tensor,
    heads: int,
    dtype: torch.dtype,
    windows: Iterable[int | None] = (None,),
) -> tuple[AttentionBackend, str]:
    """The fastest backend for a pool.

    Args:
        pool: [num_blocks, kv_heads, layers, 2, block_size, head_dim].
        heads: query heads.
        dtype: the model's.
        windows: sliding windows of its layers, as far as they are known.

    Returns:
        The backend, and the choice in one line for the log.

    Raises:
        AttentionError: None can: only FlashInfer reads an fp8 cache.
    """
    if not pool.is_cuda:
        return SdpaAttention(pool), f"attention: PyTorch's, on {pool.device.type}"
    try:
        from tasuki.attention.flashinfer import FlashInferAttention, why_not
    except ImportError as error:
        reason = f"FlashInfer cannot be imported ({error}): {_INSTALL}"
    else:
        refusal = why_not(heads, pool.shape[1], pool.shape[5], dtype, pool.dtype)
        if refusal is None:
            attention = FlashInferAttention(pool, heads, dtype, windows=windows)
            return attention, "attention: FlashInfer for prompts, our own kernels for decodes"
        reason = refusal
    if pool.dtype != dtype:
        raise AttentionError(f"a KV cache of {pool.dtype} for a model of {dtype}: {reason}")
    return SdpaAttention(pool), f"attention: PyTorch's, several times slower; {reason}"
