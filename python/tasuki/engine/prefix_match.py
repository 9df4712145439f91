"""How much of a sequence the prefix cache holds, where groups of layers keep different parts.

A prefix can be reused if every group has what the tokens after it will read: all of its
blocks, those of the last window, or the checkpoint of a state. Keeps no state. No torch.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from tasuki.engine.cache_groups import BlockTable, CacheGroup
from tasuki.engine.prefix_cache import PrefixCache


def content_key(digest: bytes, group: int) -> bytes:
    """What the prefix cache knows a block of a group by; of the first one, by its hash."""
    return digest if group == 0 else digest + group.to_bytes(2, "little")


def cached_tables(
    cache: PrefixCache, hashes: Sequence[bytes], groups: Sequence[CacheGroup], block_size: int
) -> list[BlockTable]:
    """The pages of the longest prefix that can be reused, for each group; not retained.

    Args:
        cache: What is held.
        hashes: Of the blocks that may be reused, from the sequence's first on.
        groups: Of the model.
        block_size: Tokens of a block.

    Returns:
        A table for each group. All end at the same block, the first that must be computed.
    """
    end = len(hashes)
    found: dict[int, list[int]] = {}
    for index, group in enumerate(groups):
        if group.keeps_all:
            found[index] = cache.match(content_key(digest, index) for digest in hashes[:end])
            end = len(found[index])
    if len(found) < len(groups):
        end = _reusable(cache, hashes[:end], groups, block_size)
    tables = []
    for index, group in enumerate(groups):
        first = group.first_block(end * block_size, block_size)
        pages = found.get(index)
        if pages is None:
            pages = cache.match(content_key(digest, index) for digest in hashes[first:end])
        tables.append(BlockTable(first, array("i", pages[: end - first]), group.has_state))
    return tables


def _reusable(
    cache: PrefixCache, hashes: Sequence[bytes], groups: Sequence[CacheGroup], block_size: int
) -> int:
    """The most blocks, of those with `hashes`, whose last windows and checkpoints are held."""
    end = block = len(hashes)
    while block > 0:
        block -= 1
        wanted = [
            index
            for index, group in enumerate(groups)
            if not group.keeps_all and group.first_block(end * block_size, block_size) <= block
        ]
        if not wanted:
            break
        if any(cache.find(content_key(hashes[block], index)) is None for index in wanted):
            end = block  # a longer prefix reads this block, too
    return end
