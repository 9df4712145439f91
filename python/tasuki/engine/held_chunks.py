"""Which chunks of prompts the prefix cache holds, and which came and went: what routers get.

A chunk is a fixed number of a sequence's blocks; its last block stands for it, because a
block's hash covers all tokens before it. Chunks are coarser than blocks so that routers keep
a fraction of the hashes. Owned by the prefix cache; engine thread only. No torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

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
