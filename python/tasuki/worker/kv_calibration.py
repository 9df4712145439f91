"""Scales of an fp8 cache: those of the folder, or measured when a worker starts.

A model computes TOKENS tokens drawn from a fixed seed, and the largest key and value of each
layer, over all ranks, give its scales, with room for larger ones. Workers of one model come to
the same scales on other devices and with other numbers of ranks, as scales are powers of two;
should they not, their identities differ (kv/identity.py).
"""

from __future__ import annotations

import logging
import re
from pathlib import Path

import torch

from tasuki.attention.batch import Batch
from tasuki.attention.kv_scales import LARGEST, MARGIN, UNSCALED, KvScales
from tasuki.attention.sdpa import SdpaAttention
from tasuki.execution.collective import Collective
from tasuki.kv.layout import CacheLayout
from tasuki.models.attending import cache_groups
from tasuki.models.base import CausalModel
from tasuki.models.checkpoint import Checkpoint
from tasuki.models.errors import ModelError

log = logging.getLogger(__name__)

TOKENS = 256
_BLOCK_SIZE = 16
STORED = re.compile(r"model\.layers\.(\d+)\.self_attn\.(?:[kv]_proj\.)?([kv])_scale")
"""Names of scales in a folder, as vLLM and compressed-tensors write them."""


class _Measuring(SdpaAttention):
    """Attends over a cache of the model's dtype, and keeps each layer's largest numbers."""

    def __init__(self, pool: torch.Tensor, dtype: torch.dtype) -> None:
        super().__init__(pool, dtype)
        self.largest = torch.zeros(pool.shape[2], 2, device=pool.device)

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
        """See base.py."""
        for side, x in enumerate((key, value)):
            self.largest[layer, side] = x.abs().amax().float()
        return super().forward(
            layer,
            query,
            key,
            value,
            scale=scale,
            sliding_window=sliding_window,
            written=written,
            out=out,
        )


def scales_for(
    model: CausalModel,
    folder: Path | None,
    dtype: torch.dtype,
    device: torch.device,
    collective: Collective,
) -> KvScales:
    """The scales that an fp8 cache of a model has.

    Args:
        model: Loaded; this rank's part.
        folder: Where its scales may be; None: nowhere, the weights are random.
        dtype: The model's.
        device: The model's.
        collective: Joins the ranks; all of them call this.

    Raises:
        ModelError: The folder has scales of some layers only, or one is not a positive number.
    """
    if len(cache_groups(model.spec)) > 1 or model.spec.kv_planes == 1:
        log.info("KV scales: 1, as layers keep latents, or different parts of a sequence")
        return UNSCALED
    stored = None if folder is None else stored_scales(folder, model.spec.num_layers)
    if stored is not None:
        log.info("KV scales: of the folder, powers of two %s", _line(stored))
        return stored
    largest = collective.all_gather(_largest(model, dtype, device)).amax(0)
    scales = KvScales.holding(largest.tolist(), MARGIN)
    log.info("KV scales: measured, powers of two %s", _line(scales))
    return scales


def stored_scales(folder: Path, layers: int) -> KvScales | None:
    """The scales in a folder, rounded up to powers of two; None: it has none.

    Raises:
        ModelError: It has some, but not for the keys and values of all layers; or one is not a
            positive number.
    """
    checkpoint = Checkpoint(folder, torch.float32, torch.device("cpu"))
    found: dict[tuple[int, str], float] = {}
    for name in checkpoint.names:
        if match := STORED.fullmatch(name):
            found[int(match[1]), match[2]] = checkpoint.kv_scale(name)
    if not found:
        return None
    missing = [(i, side) for i in range(layers) for side in "kv" if (i, side) not in found]
    if missing:
        raise ModelError(
            f"{folder}: {len(missing)} of {2 * layers} scales of the KV cache are missing"
            f" (layer {missing[0][0]}, {missing[0][1]}_scale): use --kv-dtype auto"
        )
    return KvScales.holding(
        [(found[i, "k"] * LARGEST, found[i, "v"] * LARGEST) for i in range(layers)]
    )


@torch.inference_mode()
def _largest(model: CausalModel, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[layers, 2] float32: this rank's largest keys and values."""
    spec = model.spec
    tokens = min(TOKENS, spec.max_position)
    blocks = -(-tokens // _BLOCK_SIZE)
    layout = CacheLayout(
        blocks, spec.num_kv_heads, spec.num_layers, _BLOCK_SIZE, spec.head_dim, dtype
    )
    attention = _Measuring(layout.allocate(device), dtype)
    generator = torch.Generator().manual_seed(0)
    at = torch.arange(tokens, device=device)
    batch = Batch(
        tokens=torch.randint(spec.vocab_size, (tokens,), generator=generator).to(device),
        positions=at,
        slots=at,
        block_tables=torch.arange(blocks, dtype=torch.int32, device=device)[None],
        query_lens=[tokens],
        context_lens=[tokens],
        logits_rows=at[-1:],
        num_decodes=0,
    )
    attention.plan(batch)
    model.forward(batch, attention)
    return attention.largest


def _line(scales: KvScales) -> str:
    parts = zip(*scales.exponents, strict=True)
    return " and ".join(
        f"{min(each)}..{max(each)} for {what}"
        for what, each in zip(("keys", "values"), parts, strict=True)
    )
