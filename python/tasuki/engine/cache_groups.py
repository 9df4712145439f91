"""What the layers of a model keep of a sequence: groups of layers that keep the same tokens.

A *page* of the pool is one block of one group: the KV of `block_size` tokens in as many
layers as a page has. All pages are of one size, so one pool serves every group, and memory
goes to whichever needs it:

    tokens          0 ...  15 | 16 ... 31 | 32 ... 47 | 48 ...
    group 0, full   page 7    | page 3    | page 12   | page 4
    group 1, window    -      |    -      | page 9    | page 5      its window begins in block 2

A sequence has a block table for each group. They end alike; a window's table begins where
the next token's window does.

Layers may also keep a *state*, of one size whatever the number of tokens (Mamba, linear
attention, short convolutions). A page of theirs has the state after the last token of its
block that was computed. While its block fills it changes at every step; a full block's
never changes again, so it is a checkpoint, from which any sequence with this prefix may go on.
What follows needs the last one alone: to a handoff and to the prefix cache, a state is a window
of two tokens. A prompt does not make a checkpoint at every block: the blocks in between have
the page of the next one that has its own.

    tokens           0 ...  15 | 16 ...  31 |  ...  | 112 ... 127 | 128 ... 143 | 144 ... 150
    group 2, state     page 8  |   page 8   |   8   |   page 8    |   page 1    |   page 6

Plain data. No torch.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

FULL = "full"
WINDOW = "window"
LATENT = "latent"
STATE = "state"

CHECKPOINT_BLOCKS = 8
"""A long prompt has a checkpoint after so many blocks, and one before and at its last block."""


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that keep the KV of the same tokens, or states.

    Attributes:
        layers: Of the model; one for each layer of a page, or fewer.
        window: Tokens that a query sees, itself included; None: all.
        latent: A slot holds one latent of all heads, not the keys and values of each.
        state_bytes: Of one layer's state; 0: the layers keep KV.
    """

    layers: tuple[int, ...] = (0,)
    window: int | None = None
    latent: bool = False
    state_bytes: int = 0

    @property
    def kind(self) -> str:
        """FULL, WINDOW, LATENT or STATE."""
        if self.state_bytes:
            return STATE
        if self.latent:
            return LATENT
        return FULL if self.window is None else WINDOW

    @property
    def has_state(self) -> bool:
        """Whether its layers keep a state, and no KV."""
        return self.state_bytes > 0

    @property
    def keeps_all(self) -> bool:
        """Whether what follows needs every token's slot."""
        return self.window is None and not self.has_state

    def first_needed(self, tokens: int) -> int:
        """The first token that those after the first `tokens` ones see."""
        if self.has_state:
            return max(0, tokens - 1)
        return 0 if self.window is None else max(0, tokens + 1 - self.window)

    def own_page(self, block: int, end: int) -> bool:
        """Whether a block of a prompt of `end` blocks has a page of its own."""
        if not self.has_state:
            return True
        return block >= end - 2 or block % CHECKPOINT_BLOCKS == CHECKPOINT_BLOCKS - 1

    def num_pages(self, begin: int, end: int) -> int:
        """Pages of the blocks from `begin` on of a prompt of `end` blocks."""
        if not self.has_state:
            return end - begin
        last = max(begin, end - 2)
        return end - last + last // CHECKPOINT_BLOCKS - begin // CHECKPOINT_BLOCKS

    def first_block(self, tokens: int, block_size: int) -> int:
        """The first block that a sequence of `tokens` tokens needs for those that follow."""
        return self.first_needed(tokens) // block_size


ONE_GROUP = (CacheGroup(),)
"""Every layer keeps every token."""


def group_layers(
    windows: Mapping[int, int | None] | Sequence[int | None],
    *,
    latent: bool = False,
    state_bytes: Mapping[int, int] | None = None,
) -> tuple[CacheGroup, ...]:
    """Put layers into groups of about the same size, so that pages are of one size.

    Layers without a window come first: routers are told of the first group's blocks.

    Args:
        windows: Of each layer that attends.
        latent: Whether they hold latents.
        state_bytes: Of the state of each layer that has one.
    """
    if not isinstance(windows, Mapping):
        windows = dict(enumerate(windows))
    kinds: dict[tuple[int, int | None], list[int]] = {}
    for layer, window in windows.items():
        kinds.setdefault((0, window), []).append(layer)
    for layer, size in (state_bytes or {}).items():
        kinds.setdefault((size, None), []).append(layer)
    least = min(map(len, kinds.values()))
    groups: list[CacheGroup] = []
    for size, window in sorted(
        kinds, key=lambda kind: (kind[0], kind[1] is not None, kind[1] or 0)
    ):
        layers = kinds[size, window]
        count = -(-len(layers) // least)
        for part in range(count):
            begin, end = (len(layers) * edge // count for edge in (part, part + 1))
            groups.append(CacheGroup(tuple(layers[begin:end]), window, latent and not size, size))
    return tuple(groups)


def layers_of_page(groups: Iterable[CacheGroup]) -> int:
    """Layers that a page has room for the KV of."""
    return max(len(group.layers) for group in groups if not group.has_state)


def pages_for(groups: Iterable[CacheGroup], blocks: int) -> int:
    """Pages of a sequence of so many blocks while its prompt is computed."""
    return sum(group.num_pages(0, blocks) for group in groups)


def longest_blocks(groups: Sequence[CacheGroup], pages: int) -> int:
    """Blocks of the longest sequence that so many pages have room for."""
    low, high = 0, pages
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if pages_for(groups, middle) <= pages else (low, middle - 1)
    return low


def pages_per_block(groups: Iterable[CacheGroup]) -> float:
    """Pages that a block of a long sequence takes."""
    return sum(1 / CHECKPOINT_BLOCKS if group.has_state else 1 for group in groups)


@dataclass(slots=True)
class BlockTable:
    """The pages of one group of a sequence.

    Attributes:
        first: The first block that is kept; those before it have left the window.
        pages: Of the blocks from there on.
        repeats: Whether neighbours may have the same page: states.
    """

    first: int = 0
    pages: array[int] = field(default_factory=lambda: array("i"))
    repeats: bool = False

    @property
    def end(self) -> int:
        """The block after the last."""
        return self.first + len(self.pages)

    @property
    def held(self) -> array[int]:
        """Its pages, each once."""
        return _once(self.pages) if self.repeats else self.pages

    def copy(self) -> BlockTable:
        """Another table of the same pages."""
        return BlockTable(self.first, self.pages[:], self.repeats)

    def part(self, begin: int, end: int) -> array[int]:
        """The pages of the blocks `begin` to `end` - 1, all of which are kept."""
        return self.pages[begin - self.first : end - self.first]

    def owns(self, block: int) -> bool:
        """Whether a kept block's page is no later one's."""
        at = block - self.first
        return at + 1 == len(self.pages) or self.pages[at] != self.pages[at + 1]

    def fill(self, group: CacheGroup, pages: Sequence[int], end: int) -> None:
        """Append the blocks up to `end` - 1, which have these pages (`CacheGroup.num_pages`)."""
        if not self.repeats:
            self.pages.extend(pages)
            return
        left = iter(pages)
        block = self.end
        for last in range(block, end):
            if group.own_page(last, end):
                self.pages.extend([next(left)] * (last + 1 - block))
                block = last + 1

    def drop_before(self, first: int) -> array[int]:
        """Keep the blocks from `first` on; returns the pages of those before it."""
        count = max(0, first - self.first)
        gone = self.pages[:count]
        del self.pages[:count]
        self.first += count
        if self.repeats and gone:
            gone = _once(gone)
            if self.pages and gone[-1] == self.pages[0]:
                gone.pop()
        return gone


def _once(pages: array[int]) -> array[int]:
    """Each of some pages once; equal ones are neighbours."""
    return array("i", dict.fromkeys(pages))


def pages_of(tables: Iterable[BlockTable]) -> Iterator[int]:
    """All pages of some tables."""
    for table in tables:
        yield from table.held
