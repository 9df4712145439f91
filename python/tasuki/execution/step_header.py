"""What a step's arrays are and mean: small enough to be sent, enough to compute from.

A step crosses from the rank that plans to all that compute as a header and a
slab (host_buffers.py): nothing else of it is known there, neither requests nor
plans. Header and slab are the same on every rank, so all launch the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tasuki.execution.host_buffers import Part


@dataclass(frozen=True, slots=True)
class StepHeader:
    """The shape of one step; lists as in `Batch`.

    Attributes:
        query_lens: Tokens of each sequence in this step.
        context_lens: Tokens of each sequence in the cache after it.
        num_decodes: Leading sequences with one token.
        width: Blocks in a row of the tables.
        wanted: Rows whose logits are wanted; with a bucket all are, in order.
        ahead: Whether some tokens are still on the device of the rank that samples.
        bucket: Rows of a padded decode batch; None: it is none.
        room: Tokens that a step of another kind is padded to; None: not padded.
        greedy: Whether the likeliest token is all that is wanted of each row.
        groups: Cache groups, each with slots and tables of its own.
        cuts: As in `Batch`.
    """

    query_lens: list[int]
    context_lens: list[int]
    num_decodes: int
    width: int
    wanted: int
    ahead: bool = False
    bucket: int | None = None
    room: int | None = None
    greedy: bool = False
    groups: int = 1
    cuts: list[list[int]] | None = None

    @property
    def tokens(self) -> int:
        """Of the batch, padding included."""
        return self.bucket or self.room or sum(self.query_lens)

    @property
    def rows(self) -> int:
        """Of the tables, padding included."""
        return len(self.query_lens) if self.bucket is None else self.bucket

    def parts(self) -> list[Part]:
        """The slab's arrays: tokens, sources, positions, slots, tables, rows wanted."""
        wanted = self.wanted if self.bucket is None else 0
        return slab_parts(self.tokens, self.rows, self.width, wanted, self.groups)


def slab_parts(tokens: int, rows: int, width: int, wanted: int, groups: int) -> list[Part]:
    """The arrays of any step, in their order; the first four's places hang on `tokens` alone.

    Slots and tables are those of all cache groups, one group after another.

    Args:
        tokens: Of the batch.
        rows: Of the tables.
        width: Of the tables.
        wanted: Rows of logits that are named.
        groups: Cache groups.
    """
    return [
        *[(tokens, torch.int64)] * 3,
        (groups * tokens, torch.int64),
        (groups * rows * width, torch.int32),
        (wanted, torch.int64),
    ]
