"""Drives a model over the paged cache without an engine: scrambled blocks, any mix of steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from tasuki.attention.base import AttentionBackend
from tasuki.attention.batch import Batch
from tasuki.attention.sdpa import SdpaAttention
from tasuki.kv.layout import CacheLayout
from tasuki.models.base import CausalModel

BLOCK_SIZE = 8
NUM_BLOCKS = 96


@dataclass
class Sequence:
    """Tokens known so far, how many of them are in the cache, and where."""

    tokens: list[int]
    cached: int = 0
    blocks: list[int] = field(default_factory=list)


class Paged:
    """A model, a pool whose free blocks are in random order, and the backend over it."""

    def __init__(
        self,
        model: CausalModel,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        attention: Callable[[torch.Tensor], AttentionBackend] = SdpaAttention,
    ) -> None:
        spec = model.spec
        layout = CacheLayout(
            NUM_BLOCKS,
            spec.num_kv_heads,
            spec.num_layers,
            BLOCK_SIZE,
            spec.head_dim,
            dtype,
            planes=spec.kv_planes,
        )
        self.model = model
        self.pool = layout.allocate(device)
        self.attention = attention(self.pool)
        order = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(5))
        self.free: list[int] = order.tolist()

    def step(self, work: list[tuple[Sequence, int]], *, all_rows: bool = True) -> torch.Tensor:
        """Feed so many tokens of each sequence; single tokens come first.

        Returns:
            Logits [R, vocab]: of every token, or of each sequence's last.
        """
        tokens, positions, slots, last = [], [], [], []
        for sequence, count in work:
            end = sequence.cached + count
            while len(sequence.blocks) * BLOCK_SIZE < end:
                sequence.blocks.append(self.free.pop())
            for position in range(sequence.cached, end):
                tokens.append(sequence.tokens[position])
                positions.append(position)
                block = sequence.blocks[position // BLOCK_SIZE]
                slots.append(block * BLOCK_SIZE + position % BLOCK_SIZE)
            sequence.cached = end
            last.append(len(tokens) - 1)
        counts = [count for _, count in work]
        decodes = sum(count == 1 for count in counts)
        assert all(count == 1 for count in counts[:decodes]), "decodes come first"
        device = self.pool.device
        width = max(len(sequence.blocks) for sequence, _ in work)
        tables = [s.blocks + [0] * (width - len(s.blocks)) for s, _ in work]
        batch = Batch(
            tokens=torch.tensor(tokens, device=device),
            positions=torch.tensor(positions, device=device),
            slots=torch.tensor(slots, device=device),
            block_tables=torch.tensor(tables, dtype=torch.int32, device=device),
            query_lens=counts,
            context_lens=[sequence.cached for sequence, _ in work],
            logits_rows=torch.tensor(range(len(tokens)) if all_rows else last, device=device),
            num_decodes=decodes,
        )
        self.attention.plan(batch)
        return self.model.forward(batch, self.attention)

    def greedy(self, prompt: list[int], count: int, chunk: int = 1000) -> list[int]:
        """The next `count` tokens, the prompt being fed in chunks."""
        sequence = Sequence(list(prompt))
        logits = torch.empty(0)
        while sequence.cached < len(prompt):
            todo = min(chunk, len(prompt) - sequence.cached)
            logits = self.step([(sequence, todo)], all_rows=False)
        for _ in range(count):
            sequence.tokens.append(int(logits[-1].argmax()))
            logits = self.step([(sequence, 1)], all_rows=False)
        self.free += sequence.blocks
        return sequence.tokens[len(prompt) :]
