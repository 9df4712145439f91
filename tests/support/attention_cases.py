"""Steps over a cache whose past is known, and attention written as the definition says."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from tasuki.attention.base import AttentionBackend
from tasuki.attention.batch import Batch

BLOCK_SIZE, NUM_BLOCKS, LAYERS = 4, 64, 3

# Of each sequence: tokens in the cache before the step, and new ones.
STEPS = {
    "one decode": [(9, 1)],
    "first token of all": [(0, 1)],
    "even decodes": [(7, 1), (7, 1)],
    "uneven decodes": [(3, 1), (22, 1), (0, 1), (8, 1)],
    "whole prompt": [(0, 11)],
    "whole prompts": [(0, 11), (0, 5), (0, 2)],
    "later chunk": [(6, 7)],
    "decodes and a whole prompt": [(3, 1), (22, 1), (0, 11)],
    "all mixed": [(3, 1), (22, 1), (0, 5), (9, 6), (4, 2)],
}


@dataclass(frozen=True)
class Shape:
    """Of a cache, and what it holds."""

    kv_heads: int
    head_dim: int = 8
    block_size: int = BLOCK_SIZE
    num_blocks: int = NUM_BLOCKS
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None
    device: torch.device | str = "cpu"


@dataclass
class Case:
    """A pool with the past of some sequences in it, and what their next step brings."""

    shape: Shape
    pool: torch.Tensor
    batch: Batch
    keys: list[torch.Tensor]  # [context, kv_heads, head_dim] of each sequence, new ones included
    values: list[torch.Tensor]

    def new(self, sequences: list[torch.Tensor]) -> torch.Tensor:
        """[T, kv_heads, head_dim]: what the step brings, of `keys` or `values`."""
        counts = self.batch.query_lens
        return torch.cat([s[-n:] for s, n in zip(sequences, counts, strict=True)])

    def query(self, heads: int) -> torch.Tensor:
        """[T, heads, head_dim], random."""
        shape = (sum(self.batch.query_lens), heads, self.shape.head_dim)
        generator = torch.Generator().manual_seed(5)
        return torch.randn(shape, generator=generator).to(self.shape.device, self.shape.dtype)

    def run(
        self,
        backend: AttentionBackend,
        layer: int,
        query: torch.Tensor,
        *,
        scale: float,
        window: int | None = None,
    ) -> torch.Tensor:
        """One layer of a planned step."""
        key, value = self.new(self.keys), self.new(self.values)
        return backend.forward(layer, query, key, value, scale=scale, sliding_window=window)


def make_case(
    layer: int, shape: Shape, lengths: list[tuple[int, int]], *, garbage: float = 0.0
) -> Case:
    """Sequences of (context before, new tokens), in blocks taken at random."""
    draw = random.Random(3)
    generator = torch.Generator().manual_seed(4)
    size, device = shape.block_size, shape.device
    kv_dtype = shape.kv_dtype or shape.dtype
    pool = torch.full((shape.num_blocks, shape.kv_heads, LAYERS, 2, size, shape.head_dim), garbage)
    free = list(range(shape.num_blocks))
    draw.shuffle(free)
    keys, values, slots, tables, positions = [], [], [], [], []
    for before, new in lengths:
        total = before + new
        blocks = [free.pop() for _ in range(-(-total // size))]
        both = torch.randn(2, total, shape.kv_heads, shape.head_dim, generator=generator)
        both = both.to(shape.dtype)
        at = torch.arange(total)
        block, offset = torch.tensor(blocks)[at // size], at % size
        past = both[:, :before].permute(1, 2, 0, 3).to(kv_dtype).float()
        pool[block[:before], :, layer, :, offset[:before]] = past
        slots += (block * size + offset)[before:].tolist()
        positions += range(before, total)
        keys.append(both[0].to(device))
        values.append(both[1].to(device))
        tables.append(blocks)
    width = max(map(len, tables))
    padded = [table + [0] * (width - len(table)) for table in tables]
    batch = Batch(
        tokens=torch.zeros(len(slots), dtype=torch.int64, device=device),
        positions=torch.tensor(positions, device=device),
        slots=torch.tensor(slots, device=device),
        block_tables=torch.tensor(padded, dtype=torch.int32, device=device),
        query_lens=[new for _, new in lengths],
        context_lens=[before + new for before, new in lengths],
        logits_rows=torch.arange(len(slots), device=device),
        num_decodes=sum(1 for _, new in lengths if new == 1),
    )
    return Case(shape, pool.to(kv_dtype).to(device), batch, keys, values)


def spread(case: Case, pool: torch.Tensor, layer: int, into: int) -> None:
    """Move what `layer` of a case's pool holds to layer `into` of `pool`, its blocks all over it.

    Both ends of the larger pool are among those in use; nothing else of it is touched.
    """
    count, size = case.pool.shape[0], case.shape.block_size
    used = case.batch.block_tables.unique().tolist()
    order = [*used, *(block for block in range(count) if block not in used)]
    drawn = random.Random(6).sample(range(1, pool.shape[0] - 1), count - 2)
    homes = torch.empty(count, dtype=torch.int64, device=pool.device)
    homes[order] = torch.tensor([0, pool.shape[0] - 1, *drawn], device=pool.device)
    for block, home in enumerate(homes.tolist()):
        pool[home, :, into] = case.pool[block, :, layer]
    batch = case.batch
    batch.block_tables = homes[batch.block_tables.long()].int()
    batch.slots = homes[batch.slots // size] * size + batch.slots % size
    case.pool = pool


def definition(case: Case, query: torch.Tensor, scale: float, window: int | None) -> torch.Tensor:
    """[T, heads, head_dim] float64: one sequence at a time, K and V as the cache rounds them."""
    kv_dtype = case.shape.kv_dtype or case.shape.dtype
    parts, row = [], 0
    for i, new in enumerate(case.batch.query_lens):
        context = case.batch.context_lens[i]
        share = query.shape[1] // case.shape.kv_heads
        keys, values = (
            x[i].to(kv_dtype).double().repeat_interleave(share, 1) for x in (case.keys, case.values)
        )
        scores = torch.einsum("qhd,khd->hqk", query[row : row + new].double(), keys) * scale
        queries = torch.arange(context - new, context, device=query.device)[:, None]
        positions = torch.arange(context, device=query.device)
        hidden = positions > queries
        if window is not None:
            hidden |= positions <= queries - window
        weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), -1)
        parts.append(torch.einsum("hqk,khd->qhd", weights, values))
        row += new
    return torch.cat(parts)


def pad(batch: Batch, bucket: int, width: int) -> Batch:
    """A decode batch as a CUDA graph gets it; see attention/batch.py."""
    count = batch.num_decodes
    device = batch.tokens.device

    def padded(x: torch.Tensor, fill: int) -> torch.Tensor:
        result = torch.full((bucket,), fill, dtype=x.dtype, device=device)
        result[:count] = x
        return result

    tables = torch.zeros(bucket, width, dtype=torch.int32, device=device)
    tables[:count, : batch.block_tables.shape[1]] = batch.block_tables
    return Batch(
        tokens=padded(batch.tokens, 0),
        positions=padded(batch.positions, 0),
        slots=padded(batch.slots, -1),
        block_tables=tables,
        query_lens=batch.query_lens,
        context_lens=batch.context_lens,
        logits_rows=torch.arange(bucket, device=device),
        num_decodes=count,
        bucket=bucket,
    )
