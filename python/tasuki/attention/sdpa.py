"""Attention with PyTorch's own operators: the CPU's backend, and the reference anywhere.

The pool is read and written through two flat views, whose row numbers `plan`
computes once a step for all layers:

    write   rows of one token's K or V of one head, [.., head_dim]
    read    rows of one plane (K or V of one block, head and layer),
            [.., block_size x head_dim]: gathered in the order
            (K|V, sequence, head, block), they are contiguous
            [2, S, kv_heads, W x block_size, head_dim], in one copy

Decodes go together, padded to the longest of them and masked; a prefill chunk
goes alone. A chunk that begins its sequence reads nothing from the pool. The
gathered copies go to one scratch buffer, so that a step allocates nothing large
for them. This file owns no state but that buffer and the plan of the current step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from tasuki.attention.batch import Batch
from tasuki.attention.grouped import additive, attend_chunk, attend_decodes, causal_mask
from tasuki.attention.kv_scales import FP8, UNSCALED, KvScales, from_fp8, to_fp8

_Masks = dict[int | None, torch.Tensor | None]
"""By sliding window; filled when a layer first needs one."""


@dataclass(slots=True)
class _Gather:
    """What layers copy out of the pool.

    Attributes:
        rows: per layer, pool rows [2 x S x kv_heads x W].
        planes: [2 x S x kv_heads x W, block_size x head_dim], where they go.
        keys, values: views of `planes`, [S, kv_heads, L, head_dim]; L is exact
            for one sequence, whole blocks for several.
    """

    rows: tuple[torch.Tensor, ...]
    planes: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


@dataclass(slots=True)
class _Decodes:
    """The single-token sequences of a step; `lengths` are tokens in the cache."""

    lengths: list[int]
    gather: _Gather
    masks: _Masks = field(default_factory=dict)


@dataclass(slots=True)
class _Chunk:
    """One sequence's part of a prefill: tokens [begin, end) of the batch."""

    begin: int
    end: int
    context: int
    gather: _Gather | None  # None: nothing before this chunk
    masks: _Masks = field(default_factory=dict)


class SdpaAttention:
    """`AttentionBackend` over one pool; see attention/base.py."""

    capturable = False
    captures_prompts = False

    def __init__(
        self,
        pool: torch.Tensor,
        dtype: torch.dtype | None = None,
        scales: KvScales = UNSCALED,
    ) -> None:
        """Attend over `pool`, [num_blocks, kv_heads, layers, planes, block_size, head_dim].

        Args:
            pool: with two planes, keys and values, or with one that is both; of any dtype
                that PyTorch computes in, or float8_e4m3fn.
            dtype: of the queries; None: the pool's.
            scales: of an fp8 pool.
        """
        self.pool, self.scales = pool, scales
        self._like = torch.empty(0, dtype=dtype or pool.dtype, device=pool.device)
        _, self._kv_heads, self._layers, count, self._block_size, self._head_dim = pool.shape
        self._num_planes = count
        # Bytes, where PyTorch does not copy the dtype by index.
        raw = pool.view(torch.uint8) if pool.dtype == FP8 else pool
        self._slots = raw.view(-1, self._head_dim)
        self._planes = raw.view(-1, self._block_size * self._head_dim)
        device = pool.device
        self._heads_of_block = torch.arange(self._kv_heads, device=device)
        self._planes_of_layer = count * torch.arange(self._layers, device=device)
        self._pair = torch.arange(count, device=device)
        self._scratch = self._planes.new_empty(0)
        self._key_rows: tuple[torch.Tensor, ...] = ()
        self._value_rows: tuple[torch.Tensor, ...] = ()
        self._decodes: _Decodes | None = None
        self._chunks: list[_Chunk] = []

    def plan(self, batch: Batch) -> None:
        """Compute the pool rows that every layer of this step writes and reads."""
        self._plan_writes(batch.slots)
        self._reserve(batch)
        n = batch.num_decodes
        self._decodes = None
        if n:
            lengths = batch.context_lens[:n]
            gather = self._plan_gather(batch.block_tables[:n], max(lengths))
            self._decodes = _Decodes(lengths, gather)
        self._chunks = []
        begin = n
        for i in range(n, len(batch.query_lens)):
            length, context = batch.query_lens[i], batch.context_lens[i]
            past = None
            if context > length:
                past = self._plan_gather(batch.block_tables[i : i + 1], context)
            self._chunks.append(_Chunk(begin, begin + length, context, past))
            begin += length

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
        key_scale, value_scale = self.scales.of(layer)
        if not written:
            self._write(self._key_rows[layer], key, key_scale)
            if self._num_planes == 2:
                self._write(self._value_rows[layer], value, value_scale)
            key, value = self.scales.seen(layer, key, value, self.pool.dtype)
        decodes = self._decodes
        if decodes is not None and not self._chunks and out is None:
            return self._decode(decodes, layer, query, scale, sliding_window)
        result = out
        if result is None:
            result = torch.empty_like(query, memory_format=torch.contiguous_format)
        if decodes is not None:
            n = len(decodes.lengths)
            result[:n] = self._decode(decodes, layer, query[:n], scale, sliding_window)
        for chunk in self._chunks:
            part = slice(chunk.begin, chunk.end)
            keys, values = key[part].transpose(0, 1), value[part].transpose(0, 1)
            if chunk.gather is not None:
                self._fetch(chunk.gather, layer)
                keys = self._read(chunk.gather.keys[0], key_scale)
                values = self._read(chunk.gather.values[0], value_scale)
            mask = self._chunk_mask(chunk, sliding_window)
            result[part] = attend_chunk(query[part], keys, values, mask, scale)
        return result

    def _plan_writes(self, slots: torch.Tensor) -> None:
        """Rows of `_slots` for each layer's keys and values, [T x kv_heads]."""
        block, offset = slots // self._block_size, slots % self._block_size
        heads = block[:, None] * self._kv_heads + self._heads_of_block
        planes = heads * (self._num_planes * self._layers)
        first = (planes * self._block_size + offset[:, None]).view(-1)
        keys = self._planes_of_layer[:, None] * self._block_size + first
        self._key_rows = keys.unbind(0)
        self._value_rows = (keys + self._block_size).unbind(0)

    def _reserve(self, batch: Batch) -> None:
        """Make the scratch buffer large enough: uses of it follow one another."""
        n = batch.num_decodes
        widest = max(map(self._width, batch.context_lens))
        decodes = n * max(map(self._width, batch.context_lens[:n]), default=0)
        elements = self._num_planes * self._kv_heads * max(decodes, widest) * self._planes.shape[1]
        if self._scratch.numel() < elements:
            self._scratch = self._scratch.new_empty(elements * 5 // 4)

    def _width(self, tokens: int) -> int:
        return -(-tokens // self._block_size)

    def _plan_gather(self, tables: torch.Tensor, longest: int) -> _Gather:
        """What sequences of up to `longest` tokens read; `tables` is [S, W or more]."""
        blocks = tables[:, None, : self._width(longest)].to(torch.int64)
        heads = blocks * self._kv_heads + self._heads_of_block[:, None]
        first = heads * (self._num_planes * self._layers)
        pair = (self._pair[:, None] + first.view(-1)).view(-1)
        size = self._planes.shape[1]
        planes = self._scratch[: pair.shape[0] * size].view(-1, size)
        both = planes.view(self._num_planes, len(tables), self._kv_heads, -1, self._head_dim)
        parts = both[:, :, :, :longest] if len(tables) == 1 else both
        keys, values = parts[0], parts[-1]
        rows = self._planes_of_layer[:, None] + pair
        return _Gather(rows.unbind(0), planes, keys, values)

    def _write(self, rows: torch.Tensor, x: torch.Tensor, scale: float) -> None:
        """Copy keys or values, [T, kv_heads, head_dim], to rows of the pool."""
        if self.pool.dtype == FP8:
            x = to_fp8(x, scale).view(torch.uint8)
        self._slots.index_copy_(0, rows, x.reshape(-1, self._head_dim))

    def _read(self, gathered: torch.Tensor, scale: float) -> torch.Tensor:
        """What was gathered, in the queries' dtype."""
        if gathered.dtype == self._like.dtype:
            return gathered
        return from_fp8(gathered.view(self.pool.dtype), scale, self._like.dtype)

    def _fetch(self, gather: _Gather, layer: int) -> None:
        torch.index_select(self._planes, 0, gather.rows[layer], out=gather.planes)

    def _decode(
        self,
        decodes: _Decodes,
        layer: int,
        query: torch.Tensor,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """[S, heads, head_dim] of the single-token sequences."""
        self._fetch(decodes.gather, layer)
        mask = self._decode_mask(decodes, window)
        key_scale, value_scale = self.scales.of(layer)
        keys = self._read(decodes.gather.keys, key_scale)
        values = self._read(decodes.gather.values, value_scale)
        return attend_decodes(query, keys, values, mask, scale)

    def _decode_mask(self, decodes: _Decodes, window: int | None) -> torch.Tensor | None:
        """[S, 1, 1, L] added to the scores; None: every key is seen."""
        width = decodes.gather.keys.shape[2]
        if window is not None and window >= width:
            window = None

        def make() -> torch.Tensor | None:
            if window is None and min(decodes.lengths) == width:
                return None
            lengths = torch.tensor(decodes.lengths, device=self._planes.device)[:, None]
            keys = torch.arange(width, device=self._planes.device)
            hidden = keys >= lengths
            if window is not None:
                hidden |= keys < lengths - window
            return additive(hidden, self._like)[:, None, None]

        return _once(decodes.masks, window, make)

    def _chunk_mask(self, chunk: _Chunk, window: int | None) -> torch.Tensor | None:
        """[tokens, context] added to the scores; None: plainly causal from position 0."""
        if window is not None and window >= chunk.context:
            window = None
        if window is None and chunk.gather is None:
            return None
        tokens = chunk.end - chunk.begin
        make = lambda: causal_mask(tokens, chunk.context, window, self._like)  # noqa: E731
        return _once(chunk.masks, window, make)


def _once(
    masks: _Masks, window: int | None, make: Callable[[], torch.Tensor | None]
) -> torch.Tensor | None:
    if window not in masks:
        masks[window] = make()
    return masks[window]
