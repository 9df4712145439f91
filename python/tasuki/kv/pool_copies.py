"""Copies between a pool and staging memory, which blocks pass through on their way to it.

Two kinds: stretches of bytes that lie one after another in staging memory (`start`), and rows
with a stride on either side (`spread`), by which blocks of another size are put together
(`repack.py`). On a GPU they run on a stream of their own. Transfer thread or staging thread,
each with copies of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@dataclass(frozen=True, slots=True)
class Rows:
    """`count` rows of `size_bytes`, from staging memory to the pool.

    Attributes:
        staged: bytes from the beginning of the staging memory to the first row.
        staged_stride: bytes from one row to the next.
        local: address of the first row in the pool.
        local_stride: bytes from one row to the next.
    """

    staged: int
    staged_stride: int
    local: int
    local_stride: int
    count: int
    size_bytes: int


class PoolCopies:
    """Copies between one pool and staging memory, on a stream of their own; one thread at a time.

    Args:
        pool: contiguous, wherever it was made; its last dimension is the KV of one token in
            one layer and plane.
    """

    def __init__(self, pool: torch.Tensor) -> None:
        self._bytes = pool.view(-1).view(torch.uint8)
        self._address = pool.data_ptr()
        self._stream = torch.cuda.Stream(pool.device) if pool.is_cuda else None  # type: ignore[no-untyped-call]
        self.slot_bytes = pool.shape[-1] * pool.element_size()  # of a token in a plane
        # Rows are copied in the widest words that divide a slot: in bytes a GPU is slow.
        self._width = next(width for width in _WORDS if self.slot_bytes % width == 0)

    def holds(self, address: int, size_bytes: int) -> bool:
        """Whether these bytes are the pool's."""
        begin = address - self._address
        return begin >= 0 and size_bytes > 0 and begin + size_bytes <= self._bytes.numel()

    def start(
        self, staged: torch.Tensor, stretches: Sequence[tuple[int, int]], *, to_pool: bool
    ) -> Callable[[], bool]:
        """Copy (address, bytes) stretches of the pool from or to where they are adjacent.

        Args:
            staged: [bytes] uint8.

        Returns:
            Says whether the copies are over.
        """
        return self._on_stream(lambda: self._copy(staged, stretches, to_pool))

    def spread(self, staged: torch.Tensor, rows: Sequence[Rows]) -> Callable[[], bool]:
        """Copy rows to the pool.

        Args:
            staged: [bytes] uint8; offsets and strides are multiples of a slot.

        Returns:
            Says whether the copies are over.
        """
        return self._on_stream(lambda: self._spread(staged, rows))

    def _on_stream(self, copy: Callable[[], None]) -> Callable[[], bool]:
        if self._stream is None:
            copy()
            return lambda: True
        with torch.cuda.stream(self._stream):
            copy()
            ended = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ended.record()
        return ended.query

    @torch.inference_mode()  # elsewhere torch refuses to write to a pool that was made in it
    def _copy(
        self, staged: torch.Tensor, stretches: Sequence[tuple[int, int]], to_pool: bool
    ) -> None:
        at = 0
        for address, size in stretches:
            begin = address - self._address
            own, there = self._bytes[begin : begin + size], staged[at : at + size]
            target, source = (own, there) if to_pool else (there, own)
            target.copy_(source, non_blocking=True)
            at += size

    @torch.inference_mode()
    def _spread(self, staged: torch.Tensor, rows: Sequence[Rows]) -> None:
        width = self._width
        if staged.device != self._bytes.device:  # strided copies between devices are slow
            staged = staged.to(self._bytes.device, non_blocking=True)
        source, target = (memory.view(_WORDS[width]) for memory in (staged, self._bytes))
        for each in rows:
            size = (each.count, each.size_bytes // width)
            at = each.local - self._address
            target.as_strided(
                size, (each.local_stride // width, 1), target.storage_offset() + at // width
            ).copy_(
                source.as_strided(
                    size,
                    (each.staged_stride // width, 1),
                    source.storage_offset() + each.staged // width,
                ),
                non_blocking=True,
            )
