"""Which blocks hold which content: hash to block, the order of eviction, and what can be reused.

Owns no references. A cached block is *referenced* (somebody holds it; the
block pool knows) or *evictable* (nobody does; it waits here, least recently
released first).

Where groups of layers keep different parts of a sequence, a prefix can be reused if every group
has what the tokens after it will read: all of its blocks, those of the last window, or the
checkpoint of a state (`cached_tables`).

Routers are told which *chunks* of prompts are held, and which came and went (`HeldChunks`). A chunk
is a fixed number of a sequence's blocks; its last block stands for it, because a block's hash
covers all tokens before it. Chunks are coarser than blocks so that routers keep a fraction of the
hashes.

Used by the engine thread only, through the block pool. No torch.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from tasuki.engine.cache_groups import BlockTable, CacheGroup

CHUNK_TOKENS = 128
"""A chunk is the fewest blocks that hold so many tokens."""
MOST_CHANGES = 1 << 16
"""Changes that wait to be taken; with more, only a new list of all is of use."""


def blocks_of_chunk(block_size: int) -> int:
    """Blocks of a chunk."""
    return -(-CHUNK_TOKENS // block_size)


def chunk_name(digest: bytes) -> int:
    """What routers call a chunk: 64 bits of the hash of its last block."""
    return int.from_bytes(digest[:8], "little")


class HeldChunks:
    """The chunks whose last block is cached, and the changes since they were last taken."""

    def __init__(self) -> None:
        self._held: set[bytes] = set()
        self._changes: dict[int, bool] | None = {}

    def __len__(self) -> int:
        """Chunks that are held."""
        return len(self._held)

    def stored(self, digest: bytes) -> None:
        """The last block of a chunk is cached."""
        self._held.add(digest)
        self._note(digest, True)

    def dropped(self, digest: bytes) -> None:
        """A block is cached no more; no-op if it is not the last one of a chunk."""
        if digest in self._held:
            self._held.remove(digest)
            self._note(digest, False)

    def take_changes(self) -> dict[int, bool] | None:
        """The names of chunks that changed since the last call, and whether they are held.

        None: there were too many, so only `names` tells what is held.
        """
        changes, self._changes = self._changes, {}
        return changes

    def names(self, digests: Iterable[bytes]) -> Iterator[int]:
        """Of blocks, by their hashes, those that stand for a chunk, by their names."""
        return (chunk_name(digest) for digest in digests if digest in self._held)

    def _note(self, digest: bytes, held: bool) -> None:
        if self._changes is not None:
            self._changes[chunk_name(digest)] = held
            if len(self._changes) > MOST_CHANGES:
                self._changes = None


class PrefixCache:
    """Content hashes of full, final blocks.

    Attributes:
        chunks: What routers are told of the content.
    """

    def __init__(self, enabled: bool = True) -> None:
        self._enabled = enabled
        self.chunks = HeldChunks()
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._evictable: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        """Cached blocks, referenced or not."""
        return len(self._hash_of)

    @property
    def num_evictable(self) -> int:
        """Cached blocks that nobody references."""
        return len(self._evictable)

    def holds(self, block: int) -> bool:
        """Whether the block's content is cached."""
        return block in self._hash_of

    def evictable(self) -> Iterable[int]:
        """The unreferenced cached blocks, next to be evicted first."""
        return self._evictable.keys()

    def find(self, digest: bytes) -> int | None:
        """The block that has this content."""
        return self._block_of.get(digest)

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """The blocks of the longest cached prefix.

        The caller references them before anything else can evict them.
        """
        found = []
        for digest in hashes:
            block = self._block_of.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def chunk_names(self, most: int) -> list[int]:
        """The names of chunks that are cached, the last used first, `most` of them.

        Looks at every cached block: some milliseconds for ten thousands of them.
        """
        return list(islice(self.chunks.names(self._recent()), most))

    def _recent(self) -> Iterator[bytes]:
        """The hashes of all cached blocks, the last used first."""
        yield from (d for block, d in self._hash_of.items() if block not in self._evictable)
        yield from (self._hash_of[block] for block in reversed(self._evictable))

    def insert(self, digest: bytes, block: int, *, ends_chunk: bool = False) -> bool:
        """Remember a referenced block's content.

        Args:
            digest: The block's chained hash.
            block: Its number.
            ends_chunk: Whether it is the last block of a chunk.

        Returns:
            False when another block has that content already; this one then
            stays uncached.
        """
        if not self._enabled or digest in self._block_of or block in self._hash_of:
            return False
        self._block_of[digest] = block
        self._hash_of[block] = digest
        if ends_chunk:
            self.chunks.stored(digest)
        return True

    def forget(self, block: int) -> None:
        """The block's content is not to be found any more; no-op if it was not cached."""
        digest = self._hash_of.pop(block, None)
        if digest is not None:
            del self._block_of[digest]
            self._evictable.pop(block, None)
            self.chunks.dropped(digest)

    def park(self, block: int) -> None:
        """The last reference to a cached block is gone: it may be evicted."""
        self._evictable[block] = None

    def unpark(self, block: int) -> None:
        """A cached block is referenced again."""
        del self._evictable[block]

    def evict(self) -> int:
        """Give up the content of the block that was released longest ago.

        Raises:
            KeyError: Nothing is evictable.
        """
        block, _ = self._evictable.popitem(last=False)
        digest = self._hash_of.pop(block)
        del self._block_of[digest]
        self.chunks.dropped(digest)
        return block

    def clear(self) -> list[int]:
        """Give up all content; returns the blocks that nobody references."""
        unreferenced = list(self._evictable)
        for digest in self._hash_of.values():
            self.chunks.dropped(digest)
        self._hash_of.clear()
        self._block_of.clear()
        self._evictable.clear()
        return unreferenced

    def check(self) -> str | None:
        """The first inconsistency of the two maps, or None."""
        for digest, block in self._block_of.items():
            if self._hash_of.get(block) != digest:
                return f"hash {digest.hex()} names block {block}, which has another hash"
        if len(self._block_of) != len(self._hash_of):
            return f"{len(self._block_of)} hashes name {len(self._hash_of)} blocks"
        for block in self._evictable:
            if block not in self._hash_of:
                return f"block {block} is evictable but not cached"
        return None


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
