"""What a step's arrays mean, the host memory that they are built in, their way to the device.

A step crosses from the rank that plans to all that compute as a header and a
slab: nothing else of it is known there, neither requests nor
plans. Header and slab are the same on every rank, so all launch the same.

All arrays of a step lie one after another in one slab, so that one copy takes
them to the device:

    slab   | tokens | sources | positions | .. | block tables |      16-byte aligned

There are two slabs, used in turn: the copy of a step in flight may still read
its own while the next step is prepared. On the CPU the slab itself is the
device's memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tasuki.engine.cache_groups import BlockTable

_ALIGN_BYTES = 16
_TYPES = {torch.int64: np.int64, torch.int32: np.int32}

Part = tuple[int, torch.dtype]
"""Elements and type of one array."""


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


class Staging:
    """Two slabs, pinned when the device is not the CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pinned = device.type != "cpu"
        self._slabs = [self._slab(4096), self._slab(4096)]
        self._parts: list[tuple[int, int, torch.dtype]] = []
        self._bytes = 0

    def take(self, *parts: Part) -> list[NDArray[Any]]:
        """Arrays to write the next step's inputs to; what they hold before is anything."""
        self._slabs.reverse()
        self._parts, self._bytes = lay_out(parts)
        if self._bytes > self._slabs[0].numel():
            self._slabs[0] = self._slab(self._bytes * 3 // 2)
        slab = self._slabs[0].numpy()
        return [slab[begin:end].view(_TYPES[kind]) for begin, end, kind in self._parts]

    def filled(self) -> memoryview:
        """The bytes of the arrays last taken: another rank's `take` and these make them there."""
        return self._slabs[0].numpy()[: self._bytes].data

    def send(self, target: torch.Tensor | None = None) -> list[torch.Tensor]:
        """The arrays last taken, on the device; the host does not wait for it.

        Args:
            target: Bytes on the device that they are to lie in.
        """
        slab = self._slabs[0][: self._bytes]
        if target is not None:
            target = target[: self._bytes]
            target.copy_(slab, non_blocking=True)
        else:
            target = slab.to(self._device, non_blocking=True)
        return [target[begin:end].view(kind) for begin, end, kind in self._parts]

    def _slab(self, size_bytes: int) -> torch.Tensor:
        return torch.zeros(size_bytes, dtype=torch.uint8, pin_memory=self._pinned)


def lay_out(parts: Sequence[Part]) -> tuple[list[tuple[int, int, torch.dtype]], int]:
    """Begin, end and type of each part in a slab, in bytes, and the slab's size."""
    places, at = [], 0
    for count, kind in parts:
        end = at + count * kind.itemsize
        places.append((at, end, kind))
        at = -(-end // _ALIGN_BYTES) * _ALIGN_BYTES
    return places, at


def upload(values: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of these values on the device; the host does not wait for the copy."""
    if device.type == "cpu":
        return torch.tensor(values, dtype=dtype)
    # Not `pin_memory=True` at once: torch 2.11 refuses it for arrays of NumPy.
    host = torch.tensor(values, dtype=dtype).pin_memory()
    return host.to(device, non_blocking=True)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in host memory (pinned, from a GPU), which is there once the stream gets to it."""
    if not tensor.is_cuda:
        return tensor.clone()
    there = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return there.copy_(tensor, non_blocking=True)


def write_tables(out: NDArray[np.int32], tables: Sequence[BlockTable]) -> NDArray[np.int32]:
    """Fill `out`, [S, W], with block tables of one group, none of which is empty.

    What a table does not fill repeats its first page: whatever a kernel reads
    there is the sequence's own.

    Returns:
        The same as `out`.
    """
    width, count = out.shape[1], len(tables)
    pages = [table.pages for table in tables]
    firsts = np.fromiter((table.first for table in tables), dtype=np.int64, count=count)
    lengths = np.fromiter(map(len, pages), dtype=np.int64, count=count)
    if (firsts + lengths).max(initial=0) > width:
        pages = [part[: width - table.first] for part, table in zip(pages, tables, strict=True)]
        np.minimum(lengths, width - firsts, out=lengths)
    flat = np.frombuffer(b"".join(pages), dtype=np.int32)
    out[:] = flat[lengths.cumsum() - lengths][:, None]
    filled = np.arange(width) < (firsts + lengths)[:, None]
    if firsts.any():
        filled &= np.arange(width) >= firsts[:, None]
    out[filled] = flat
    return out
