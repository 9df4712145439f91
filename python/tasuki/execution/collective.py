"""How the ranks of a worker speak to each other while they compute: the interface, and one alone.

Every rank calls the same in the same order. On CUDA a call only puts work into
the current stream, and may be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import Protocol

import torch


class Collective(Protocol):
    """The ranks' common operations; `distributed.py` has those of several ranks."""

    @property
    def rank(self) -> int:
        """This one's number, from 0."""

    @property
    def size(self) -> int:
        """How many there are."""

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that plans and samples."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' `x`, of one shape and dtype; valid until the next call.

        May overwrite `x`.
        """

    def place(self, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Where `all_reduce` had best find its argument, [rows, width]; None: anywhere.

        The same at every call, so what was summed last may lie in it.
        """

    def gather(self, x: torch.Tensor, width: int) -> torch.Tensor:
        """All ranks' columns side by side, on the first rank.

        Args:
            x: [R, w], R and w the same on all ranks.
            width: Columns in all; what is beyond is padding of the last ranks.

        Returns:
            [R, width] on the first rank; anything of R rows on the others.
        """

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Every rank's `x`, float32 and small, of one shape: [size, *shape] on all ranks."""

    def from_first(self, x: torch.Tensor) -> torch.Tensor:
        """The first rank's `x`; int64 from 0 to 2^24 - 1, of one shape; may overwrite it."""

    def fence(self) -> None:
        """Nothing that comes after it on the first rank begins before all ranks are here."""


class Alone:
    """A worker of one rank."""

    rank, size, is_first = 0, 1, True

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The same."""
        return x

    def place(self, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Anywhere."""
        return None

    def gather(self, x: torch.Tensor, width: int) -> torch.Tensor:
        """The same."""
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """The same, of one rank."""
        return x[None]

    def from_first(self, x: torch.Tensor) -> torch.Tensor:
        """The same."""
        return x

    def fence(self) -> None:
        """Nobody is waited for."""


ALONE = Alone()
