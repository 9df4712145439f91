"""Pools in the shape of Qwen3-4B's KV, and what a long life makes of them.

36 layers, 8 KV heads of 128, bfloat16: 147,456 bytes a token.
"""

from __future__ import annotations

import random

import torch

from tasuki.engine.block_pool import BlockPool
from tasuki.engine.prefix_cache import PrefixCache
from tasuki.kv.layout import CacheLayout

LAYERS, KV_HEADS, HEAD_DIM = 36, 8, 128
UNIT_TOKENS = 16  # every block size is a multiple; the pattern is written by units
TOKEN_BYTES = LAYERS * KV_HEADS * 2 * HEAD_DIM * 2


def layout_of(pool_bytes: int, block_size: int) -> CacheLayout:
    """The pool of blocks of `block_size` tokens."""
    return CacheLayout(
        num_blocks=pool_bytes // (TOKEN_BYTES * block_size),
        kv_heads=KV_HEADS,
        layers=LAYERS,
        block_size=block_size,
        head_dim=HEAD_DIM,
        dtype=torch.bfloat16,
    )


def units_of(memory: torch.Tensor) -> torch.Tensor:
    """[units, elements] int32: a unit is the KV of `UNIT_TOKENS` tokens."""
    whole = memory.shape[0] // (UNIT_TOKENS * TOKEN_BYTES) * (UNIT_TOKENS * TOKEN_BYTES)
    return memory[:whole].view(torch.int32).view(-1, UNIT_TOKENS * TOKEN_BYTES // 4)


class Wear:
    """The state of a pool after a long life."""

    def __init__(self, num_blocks: int, ages: int, longest: int, seed: int) -> None:
        self._random = random.Random(seed)
        self._pool = BlockPool(num_blocks, PrefixCache(enabled=False))
        held: list[list[int]] = []
        for _ in range(ages):
            count = self._random.randint(1, longest)
            if held and (self._random.random() < 0.5 or count > self._pool.available // 2):
                self._pool.release(held.pop(self._random.randrange(len(held))))
            else:
                held.append(self._pool.allocate(count))

    def aged(self, count: int) -> list[int]:
        """What the worn pool gives to a prompt of `count` blocks; it stays given for the next."""
        if self._pool.available < 2 * count:
            raise SystemExit(f"--pool-gb is too small for prompts of {count} blocks")
        blocks = self._pool.allocate(count)
        self._pool.release(blocks[: count // 2])  # so that the next one gets others, too
        return blocks

    def scattered(self, count: int) -> list[int]:
        """Blocks from anywhere."""
        return self._random.sample(range(self._pool.num_blocks), count)
