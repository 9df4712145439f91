"""What the layers of a model keep of a sequence: groups of layers that keep the same tokens.

A *page* of the pool is one block of one group: the KV of `block_size` tokens in as many
layers as a page has. All pages are of one size, so one pool serves every group, and memory
goes to whichever needs it:

    tokens          0 ...  15 | 16 ... 31 | 32 ... 47 | 48 ...
    group 0, full   page 7    | page 3    | page 12   | page 4
    group 1, window    -      |    -      | page 9    | page 5      its window begins in block 2

A sequence has a block table for each group. They end alike; a window's table begins where
the next token's window does. Plain data. No torch.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

FULL = "full"
WINDOW = "window"
LATENT = "latent"


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that keep the KV of the same tokens.

    Attributes:
        layers: Of the model; one for each layer of a page, or fewer.
        window: Tokens that a query sees, itself included; None: all.
        latent: A slot holds one latent of all heads, not the keys and values of each.
    """

    layers: tuple[int, ...] = (0,)
    window: int | None = None
    latent: bool = False

    @property
    def kind(self) -> str:
        """FULL, WINDOW or LATENT."""
        if self.latent:
            return LATENT
        return FULL if self.window is None else WINDOW

    def first_needed(self, tokens: int) -> int:
        """The first token that those after the first `tokens` ones see."""
        return 0 if self.window is None else max(0, tokens + 1 - self.window)

    def first_block(self, tokens: int, block_size: int) -> int:
        """The first block that a sequence of `tokens` tokens needs for those that follow."""
        return self.first_needed(tokens) // block_size


ONE_GROUP = (CacheGroup(),)
"""Every layer keeps every token."""


def group_layers(windows: Sequence[int | None], *, latent: bool = False) -> tuple[CacheGroup, ...]:
    """Put layers into groups of about the same size, so that pages are of one size.

    Layers without a window come first: routers are told of the first group's blocks.

    Args:
        windows: Of each layer.
        latent: Whether they hold latents.
    """
    kinds: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        kinds.setdefault(window, []).append(layer)
    least = min(map(len, kinds.values()))
    groups: list[CacheGroup] = []
    for window in sorted(kinds, key=lambda window: (window is not None, window or 0)):
        layers = kinds[window]
        count = -(-len(layers) // least)
        for part in range(count):
            begin, end = (len(layers) * edge // count for edge in (part, part + 1))
            groups.append(CacheGroup(tuple(layers[begin:end]), window, latent))
    return tuple(groups)


def layers_of_page(groups: Iterable[CacheGroup]) -> int:
    """Layers that a page has room for."""
    return max(len(group.layers) for group in groups)


@dataclass(slots=True)
class BlockTable:
    """The pages of one group of a sequence.

    Attributes:
        first: The first block that is kept; those before it have left the window.
        pages: Of the blocks from there on.
    """

    first: int = 0
    pages: array[int] = field(default_factory=lambda: array("i"))

    @property
    def end(self) -> int:
        """The block after the last."""
        return self.first + len(self.pages)

    def copy(self) -> BlockTable:
        """Another table of the same pages."""
        return BlockTable(self.first, self.pages[:])

    def part(self, begin: int, end: int) -> array[int]:
        """The pages of the blocks `begin` to `end` - 1, all of which are kept."""
        return self.pages[begin - self.first : end - self.first]

    def drop_before(self, first: int) -> array[int]:
        """Keep the blocks from `first` on; returns the pages of those before it."""
        count = max(0, first - self.first)
        gone = self.pages[:count]
        del self.pages[:count]
        self.first += count
        return gone


def pages_of(tables: Iterable[BlockTable]) -> Iterator[int]:
    """All pages of some tables."""
    for table in tables:
        yield from table.pages
