"""Attention on CUDA without FlashInfer: decodes by our own kernels, prompts by PyTorch's operators.

Decode steps run in CUDA graphs as they do with FlashInfer. Steps with prompts are launched
kernel by kernel, and their attention takes several times as long. Runs on the engine thread.
"""

from __future__ import annotations

import torch

from tasuki.attention.batch import Batch
from tasuki.attention.decode import DecodeAttention, DecodePlan, no_fp8
from tasuki.attention.errors import AttentionError
from tasuki.attention.kv_scales import UNSCALED, KvScales
from tasuki.attention.sdpa import SdpaAttention
from tasuki.attention.write import write
from tasuki.device_limits import limits_of


class OwnAttention:
    """`AttentionBackend` over one pool on one CUDA device; see attention/base.py."""

    capturable = True
    captures_prompts = False

    def __init__(
        self,
        pool: torch.Tensor,
        heads: int,
        dtype: torch.dtype,
        scales: KvScales = UNSCALED,
    ) -> None:
        """Attend over `pool`, [num_blocks, kv_heads, layers, 2, block_size, head_dim].

        Args:
            pool: of `dtype`, or float8_e4m3fn.
            heads: query heads.
            dtype: of queries, keys and values: bfloat16 or float16.
            scales: of an fp8 pool.

        Raises:
            AttentionError: `why_not` has a reason.
        """
        if reason := why_not(heads, pool, dtype):
            raise AttentionError(reason)
        self.pool, self.scales = pool, scales
        self._decode = DecodeAttention(pool, heads, scales=scales)
        self._prompts = SdpaAttention(pool, dtype, scales)
        self._batch: Batch | None = None
        # By sliding window; windows become known at their first forward.
        self._plans: dict[int | None, DecodePlan] = {}

    def plan(self, batch: Batch) -> None:
        """Plan decodes for every known window, and prompts; see base.py."""
        self._batch = batch
        decodes = batch.num_decodes
        if batch.bucket or decodes:
            self._plans = {window: self._decode.plan(batch, window) for window in self._plans}
        if len(batch.query_lens) > decodes:
            self._prompts.plan(_without_decodes(batch))

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
        """Write key and value to their slots, then attend causally; see base.py."""
        batch = self._batch
        assert batch is not None
        if not written:
            key, value = self.scales.seen(layer, key, value, self.pool.dtype)
            write(key, value, batch.slots, self.pool, layer, self.scales.of(layer))
        result = out
        if result is None:
            result = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        decodes = batch.num_decodes
        if batch.bucket or decodes:
            plan = self._plan_for(sliding_window, batch)
            self._decode.forward(plan, layer, query, scale, result)
        if len(batch.query_lens) > decodes:
            self._prompts.forward(
                layer,
                query[decodes:],
                key[decodes:],
                value[decodes:],
                scale=scale,
                sliding_window=sliding_window,
                written=True,
                out=result[decodes:],
            )
        return result

    def _plan_for(self, window: int | None, batch: Batch) -> DecodePlan:
        plan = self._plans.get(window)
        if plan is None:
            if self.pool.is_cuda and torch.cuda.is_current_stream_capturing():
                raise AttentionError(
                    f"sliding window {window} comes first under graph capture: run the model once"
                    f" before capturing"
                )
            plan = self._plans[window] = self._decode.plan(batch, window)
        return plan


def why_not(heads: int, pool: torch.Tensor, dtype: torch.dtype) -> str | None:
    """Why our kernels cannot attend over this pool; None: they can."""
    kv_heads, head_dim = pool.shape[1], pool.shape[5]
    if dtype not in (torch.bfloat16, torch.float16):
        return f"our decode kernels compute in bfloat16 or float16, the model is in {dtype}"
    if pool.dtype not in (dtype, torch.float8_e4m3fn):
        return f"the KV cache is {pool.dtype}, must be {dtype} or float8_e4m3fn"
    if pool.dtype != dtype and not limits_of(pool.device).has_fp8:
        return no_fp8(limits_of(pool.device))
    if not 16 <= head_dim <= 256 or head_dim & (head_dim - 1):
        return f"head_dim is {head_dim}, our decode kernels take 16, 32, 64, 128 or 256"
    if heads % kv_heads:
        return f"{heads} query heads over {kv_heads} KV heads: must divide"
    return None


def _without_decodes(batch: Batch) -> Batch:
    first = batch.num_decodes
    return Batch(
        tokens=batch.tokens[first:],
        positions=batch.positions[first:],
        slots=batch.slots[first:],
        block_tables=batch.block_tables[first:],
        query_lens=batch.query_lens[first:],
        context_lens=batch.context_lens[first:],
        logits_rows=batch.logits_rows,
        num_decodes=0,
    )
