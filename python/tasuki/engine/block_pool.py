"""Who holds which block: reference counts over one pool of numbered blocks.

Every block is in exactly one of four states:

    free ──allocate──▶ referenced ──release──▶ free
                        │      ▲  └─release──▶ evictable (content cached)
                quarantine     └──retain──────┘     │
                        ▼                           └─allocate──▶ referenced
                   quarantined ──free_quarantined──▶ free

The tensor behind the numbers starts zeroed (kv/layout.py), so a block that was
never written holds finite values. Used by the engine thread only. No torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from tasuki.engine.errors import OutOfBlocksError, PoolImbalanceError
from tasuki.engine.prefix_cache import PrefixCache


class BlockPool:
    """Reference counts, free list and quarantine of blocks 0 to num_blocks - 1."""

    def __init__(self, num_blocks: int, cache: PrefixCache) -> None:
        self.num_blocks = num_blocks
        self.cache = cache
        self._refs = [0] * num_blocks
        # A stack with the lowest number on top: neighbours are handed out
        # together, and a transfer can join them into one run.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._quarantined: set[int] = set()

    @property
    def available(self) -> int:
        """Blocks that `allocate` can give: free or evictable."""
        return len(self._free) + self.cache.num_evictable

    @property
    def num_quarantined(self) -> int:
        """Blocks that a transfer may still write to and nobody holds."""
        return len(self._quarantined)

    @property
    def num_referenced(self) -> int:
        """Blocks that somebody holds."""
        return self.num_blocks - self.available - len(self._quarantined)

    def references(self, block: int) -> int:
        """How many holders the block has."""
        return self._refs[block]

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, each with one reference; evicts when none is free.

        Raises:
            OutOfBlocksError: Fewer are available; nothing is taken then.
        """
        if count > self.available:
            raise OutOfBlocksError(
                f"{count} blocks wanted, {self.available} of {self.num_blocks} are available: "
                "the caller must check first"
            )
        taken = []
        for _ in range(count):
            block = self._free.pop() if self._free else self.cache.evict()
            self._refs[block] = 1
            taken.append(block)
        return taken

    def retain(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block; all are referenced or cached."""
        refs = self._refs
        for block in blocks:
            if refs[block] == 0:
                self.cache.unpark(block)
            refs[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drop a reference to each block of a sequence, given in its order.

        Works from the tail, so that a cached chain is evicted tail first.
        """
        refs = self._refs
        for block in reversed(blocks):
            count = refs[block] - 1
            if count < 0:
                raise PoolImbalanceError(f"block {block} is released but nobody holds it")
            refs[block] = count
            if count == 0:
                if self.cache.holds(block):
                    self.cache.park(block)
                else:
                    self._free.append(block)

    def flush_cache(self) -> None:
        """Forget all cached content; blocks that nobody references are free."""
        self._free.extend(self.cache.clear())

    def unreferenced(self, blocks: Iterable[int]) -> int:
        """How many of these (cached) blocks nobody holds: retaining takes them from `available`."""
        refs = self._refs
        return sum(1 for block in blocks if refs[block] == 0)

    def quarantine(self, blocks: Iterable[int]) -> None:
        """The only holder leaves blocks that a transfer may still write to."""
        for block in blocks:
            if self._refs[block] != 1:
                raise PoolImbalanceError(
                    f"block {block} has {self._refs[block]} holders; only a block with one can be "
                    "quarantined"
                )
            self.cache.forget(block)
            self._refs[block] = 0
            self._quarantined.add(block)

    def free_quarantined(self, blocks: Iterable[int]) -> None:
        """No transfer writes to these any more."""
        for block in blocks:
            if block not in self._quarantined:
                raise PoolImbalanceError(f"block {block} is not quarantined")
            self._quarantined.remove(block)
            self._free.append(block)

    def check(self, holders: Iterable[Iterable[int]]) -> None:
        """Compare the counts with what the holders say they hold.

        Args:
            holders: The blocks of each holder; a block held twice comes twice.

        Raises:
            PoolImbalanceError: Names each kind of imbalance and its first blocks.
        """
        held: Counter[int] = Counter()
        for blocks in holders:
            held.update(blocks)
        faults: list[str] = []
        for block, count in enumerate(self._refs):
            if count != held[block]:
                faults.append(f"block {block} counts {count} references, {held[block]} are held")
        free = Counter(self._free)
        parked = set(self.cache.evictable())
        for block in range(self.num_blocks):
            places = (
                free[block]
                + (block in parked)
                + (block in self._quarantined)
                + (self._refs[block] > 0)
            )
            if places != 1:
                faults.append(f"block {block} is in {places} states at once")
        broken = self.cache.check()
        if broken:
            faults.append(broken)
        if faults:
            more = f" (and {len(faults) - 8} more)" if len(faults) > 8 else ""
            raise PoolImbalanceError("; ".join(faults[:8]) + more)
