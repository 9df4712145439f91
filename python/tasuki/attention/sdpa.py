"""Attention with PyTorch's own operators: the CPU's backend, and the reference anywhere.

The pool is read and written through two flat views, whose row numbers `plan`
computes once a step for all layers:

    write   rows of one token's K or V of one head, [.., head_dim]
    read    rows of one plane (K or V of one block, head and layer),
            [.., block_size x head_dim]: gathered in the order
            (K|V, sequence, head, block), they are contiguous
            [2, S, kv_heads, W x block_size, head_dim], in one copy

Decodes go together, padded to the longest of them and masked; a prefill chunk
goes alone. A chunk that begins its sequence reads nothing from the pool.

The heads that share a KV head are rows of one query matrix, so K and V are
never repeated. This file owns no state but the plan of the current step.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F  # noqa: N812

from tasuki.engine.batch import Batch


@dataclass(slots=True)
class _Decodes:
    """The single-token sequences of a step.

    Attributes:
        rows: [layers, 2 x S x kv_heads x W] pool rows to gather.
        lengths: [S] tokens in the cache.
        longest: of them.
        even: all have the same length, so that no mask is needed.
    """

    count: int
    rows: torch.Tensor
    lengths: torch.Tensor
    longest: int
    even: bool
    gathered: torch.Tensor
    masks: dict[int | None, torch.Tensor | None] = field(default_factory=dict)


@dataclass(slots=True)
class _Chunk:
    """One sequence's part of a prefill: tokens [begin, end) of the batch."""

    begin: int
    end: int
    context: int
    rows: torch.Tensor | None  # as in _Decodes; None: nothing before this chunk
    masks: dict[int | None, torch.Tensor | None] = field(default_factory=dict)


class SdpaAttention:
    """`AttentionBackend` over one pool; see attention/base.py."""

    def __init__(self, pool: torch.Tensor) -> None:
        """Attend over `pool`, [num_blocks, kv_heads, layers, 2, block_size, head_dim]."""
        _, self._kv_heads, self._layers, _, self._block_size, self._head_dim = pool.shape
        self._slots = pool.view(-1, self._head_dim)
        self._planes = pool.view(-1, self._block_size * self._head_dim)
        self._dtype, device = pool.dtype, pool.device
        self._heads_of_block = torch.arange(self._kv_heads, device=device)
        self._planes_of_layer = 2 * torch.arange(self._layers, device=device)
        self._pair = torch.arange(2, device=device)
        self._scratch = torch.empty(0, dtype=self._dtype, device=device)
        self._write_rows = torch.empty(0, dtype=torch.int64, device=device)
        self._decodes: _Decodes | None = None
        self._chunks: list[_Chunk] = []

    def plan(self, batch: Batch) -> None:
        """Compute the pool rows that every layer of this step writes and reads."""
        self._write_rows = self._plan_writes(batch.slots)
        n = batch.num_decodes
        self._decodes = self._plan_decodes(batch, n) if n else None
        self._chunks = []
        begin = n
        for i in range(n, len(batch.query_lens)):
            length, context = batch.query_lens[i], batch.context_lens[i]
            rows = None
            if context > length:
                rows = self._plan_reads(batch.block_tables[i : i + 1], context)
            self._chunks.append(_Chunk(begin, begin + length, context, rows))
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
    ) -> torch.Tensor:
        """Write key and value to their slots, then attend causally; see base.py."""
        writes = self._write_rows[layer]
        self._slots.index_copy_(0, writes[0], key.reshape(-1, self._head_dim))
        self._slots.index_copy_(0, writes[1], value.reshape(-1, self._head_dim))
        if not self._chunks:
            assert self._decodes is not None
            return self._decode(self._decodes, layer, query, scale, sliding_window)
        result = torch.empty_like(query, memory_format=torch.contiguous_format)
        if self._decodes is not None:
            n = self._decodes.count
            result[:n] = self._decode(self._decodes, layer, query[:n], scale, sliding_window)
        for chunk in self._chunks:
            part = slice(chunk.begin, chunk.end)
            result[part] = self._prefill(
                chunk, layer, query[part], key[part], value[part], scale, sliding_window
            )
        return result

    def _plan_writes(self, slots: torch.Tensor) -> torch.Tensor:
        """[layers, 2, T x kv_heads] rows of `_slots`."""
        block, offset = slots // self._block_size, slots % self._block_size
        planes = (block[:, None] * self._kv_heads + self._heads_of_block) * (2 * self._layers)
        first = (planes * self._block_size + offset[:, None]).view(-1)
        planes = self._planes_of_layer[:, None] + self._pair
        return (planes * self._block_size)[:, :, None] + first

    def _plan_reads(self, tables: torch.Tensor, longest: int) -> torch.Tensor:
        """[layers, 2 x S x kv_heads x W] rows of `_planes`; W covers `longest` tokens."""
        width = -(-longest // self._block_size)
        blocks = tables[:, None, :width].to(torch.int64)
        first = (blocks * self._kv_heads + self._heads_of_block[:, None]) * (2 * self._layers)
        pair = (self._pair[:, None] + first.view(-1)).view(-1)
        return self._planes_of_layer[:, None] + pair

    def _plan_decodes(self, batch: Batch, count: int) -> _Decodes:
        lengths = batch.context_lens[:count]
        longest = max(lengths)
        rows = self._plan_reads(batch.block_tables[:count], longest)
        planes, width = rows.shape[1], self._planes.shape[1]
        if self._scratch.numel() < planes * width:
            self._scratch = self._scratch.new_empty(planes * width * 5 // 4)
        return _Decodes(
            count=count,
            rows=rows,
            lengths=torch.tensor(lengths, device=rows.device),
            longest=longest,
            even=min(lengths) == longest,
            gathered=self._scratch[: planes * width].view(planes, width),
        )

    def _decode(
        self,
        decodes: _Decodes,
        layer: int,
        query: torch.Tensor,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """[S, heads, head_dim] of the single-token sequences."""
        count, longest = decodes.count, decodes.longest
        torch.index_select(self._planes, 0, decodes.rows[layer], out=decodes.gathered)
        both = decodes.gathered.view(2, count, self._kv_heads, -1, self._head_dim)
        mask = self._decode_mask(decodes, window)
        attended = F.scaled_dot_product_attention(
            query.view(count, self._kv_heads, -1, self._head_dim),
            both[0, :, :, :longest],
            both[1, :, :, :longest],
            mask,
            scale=scale,
        )
        return attended.reshape(query.shape)

    def _prefill(
        self,
        chunk: _Chunk,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """[tokens, heads, head_dim] of one chunk."""
        if chunk.rows is None:
            keys, values = key.transpose(0, 1), value.transpose(0, 1)
        else:
            gathered = torch.index_select(self._planes, 0, chunk.rows[layer])
            both = gathered.view(2, self._kv_heads, -1, self._head_dim)
            keys, values = both[:, :, : chunk.context]
        mask = self._chunk_mask(chunk, window)
        # [kv_heads, heads that share it, tokens, head_dim]; K and V repeat with stride 0
        grouped = query.view(query.shape[0], self._kv_heads, -1, self._head_dim)
        share = grouped.shape[2]
        attended = F.scaled_dot_product_attention(
            grouped.permute(1, 2, 0, 3),
            keys[:, None].expand(-1, share, -1, -1),
            values[:, None].expand(-1, share, -1, -1),
            mask,
            is_causal=mask is None,
            scale=scale,
        )
        return attended.permute(2, 0, 1, 3).reshape(query.shape)

    def _decode_mask(self, decodes: _Decodes, window: int | None) -> torch.Tensor | None:
        """[S, 1, 1, longest] added to the scores; None: every key is seen."""
        if window is not None and window >= decodes.longest:
            window = None
        if window not in decodes.masks:
            decodes.masks[window] = None
            if window is not None or not decodes.even:
                keys = torch.arange(decodes.longest, device=decodes.lengths.device)
                lengths = decodes.lengths[:, None]
                hidden = keys >= lengths
                if window is not None:
                    hidden |= keys < lengths - window
                decodes.masks[window] = self._additive(hidden)[:, None, None]
        return decodes.masks[window]

    def _chunk_mask(self, chunk: _Chunk, window: int | None) -> torch.Tensor | None:
        """[tokens, context] added to the scores; None: plainly causal from position 0."""
        if window is not None and window >= chunk.context:
            window = None
        if window is None and chunk.rows is None:
            return None
        if window not in chunk.masks:
            first = chunk.context - (chunk.end - chunk.begin)
            device = self._planes.device
            queries = torch.arange(first, chunk.context, device=device)[:, None]
            keys = torch.arange(chunk.context, device=device)
            hidden = keys > queries
            if window is not None:
                hidden |= keys <= queries - window
            chunk.masks[window] = self._additive(hidden)
        return chunk.masks[window]

    def _additive(self, hidden: torch.Tensor) -> torch.Tensor:
        zeros = torch.zeros(hidden.shape, dtype=self._dtype, device=hidden.device)
        return zeros.masked_fill_(hidden, float("-inf"))
