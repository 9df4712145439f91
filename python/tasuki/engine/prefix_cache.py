"""Which blocks hold which content: hash to block, and the order of eviction.

Owns no references. A cached block is *referenced* (somebody holds it; the
block pool knows) or *evictable* (nobody does; it waits here, least recently
released first). Used by the engine thread only, through the block pool.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import islice

from tasuki.engine.held_chunks import HeldChunks


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
