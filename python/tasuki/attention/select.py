"""Which backend attends over a pool."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from tasuki.attention.base import AttentionBackend
from tasuki.attention.errors import AttentionError
from tasuki.attention.kv_scales import UNSCALED, KvScales
from tasuki.attention.sdpa import SdpaAttention
from tasuki.device_limits import NO_FLASHINFER, lacks_flashinfer

_INSTALL = "pip install 'flashinfer-python>=0.6.14,<0.7'"


def make_attention(
    pool: torch.Tensor,
    heads: int,
    dtype: torch.dtype,
    windows: Iterable[int | None] = (None,),
    scales: KvScales = UNSCALED,
) -> tuple[AttentionBackend, str]:
    """The fastest backend for a pool.

    Args:
        pool: [num_blocks, kv_heads, layers, planes, block_size, head_dim].
        heads: query heads.
        dtype: the model's.
        windows: sliding windows of its layers, as far as they are known.
        scales: of an fp8 pool.

    Returns:
        The backend, and the choice in one line for the log.

    Raises:
        AttentionError: No backend reads a cache of this dtype.
        torch.OutOfMemoryError: A backend's buffers do not fit.
    """
    if not pool.is_cuda:
        return SdpaAttention(pool, dtype, scales), f"attention: PyTorch's, on {pool.device.type}"
    if pool.shape[3] == 1:
        if pool.dtype != dtype:
            raise AttentionError(
                f"a KV cache of {pool.dtype} for a model of {dtype} with latent attention:"
                " leave out --kv-dtype"
            )
        return SdpaAttention(pool), "attention: PyTorch's, several times slower; of latents"
    attention, reason = _flashinfer(pool, heads, dtype, windows, scales)
    if attention is not None:
        return attention, "attention: FlashInfer for prompts, our own kernels for decodes"
    from tasuki.attention.own import OwnAttention, why_not  # imports Triton

    refusal = why_not(heads, pool, dtype)
    if refusal is None:
        return OwnAttention(pool, heads, dtype, scales), (
            f"attention: our own kernels for decodes, PyTorch's for prompts, several times slower;"
            f" {reason}"
        )
    if pool.dtype != dtype:
        raise AttentionError(
            f"a KV cache of {pool.dtype} for a model of {dtype}: {reason}; {refusal}"
        )
    return SdpaAttention(pool), f"attention: PyTorch's, several times slower; {reason}; {refusal}"


def _flashinfer(
    pool: torch.Tensor,
    heads: int,
    dtype: torch.dtype,
    windows: Iterable[int | None],
    scales: KvScales,
) -> tuple[AttentionBackend | None, str]:
    """FlashInfer's backend; or None and why it cannot be had.

    Whatever FlashInfer raises, at import or when it compiles its kernels, is a reason to do
    without it: another version, another CUDA, no compiler.
    """
    if lacks_flashinfer():
        return None, f"FlashInfer is not used ({NO_FLASHINFER})"
    try:
        from tasuki.attention.flashinfer import FlashInferAttention
        from tasuki.attention.flashinfer_kernels import why_not

        refusal = why_not(heads, pool.shape[1], pool.shape[5], dtype, pool.dtype)
        if refusal is not None:
            return None, refusal
        return FlashInferAttention(pool, heads, dtype, windows=windows, scales=scales), ""
    except torch.OutOfMemoryError:
        raise
    except ImportError as error:
        return None, f"FlashInfer cannot be imported ({error}): {_INSTALL}"
    except Exception as error:
        first = (str(error).strip().splitlines() or ["no message"])[0]
        return None, f"FlashInfer cannot be used ({type(error).__name__}: {first}): {_INSTALL}"
