"""A step divided into parts, in the arrays that paged attention kernels take.

A step is one or two parts, each one call a layer: decodes, one token each, in a
CUDA graph when the batch has a bucket; and chunks of prompts. Lengths are laid
out on the host in pinned memory; block ids are laid end to end on the device,
where their tables are already.

Owns the pinned memory, of which there is two in turn (a step in flight may still
have its copies before it), and for each bucket the arrays that its graph reads.
Runs on the engine thread.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from tasuki.attention.errors import AttentionError
from tasuki.attention.tables import flatten
from tasuki.engine.batch import Batch


@dataclass(frozen=True, slots=True)
class Part:
    """Some sequences of a step, for one call; arrays are pinned int32 on the host.

    Attributes:
        rows: of the batch's tokens.
        queries: [S + 1] where each sequence's queries begin.
        longest: the most queries of a sequence.
        blocks: [S + 1] where each sequence's block ids begin.
        last: [S] slots used in each sequence's last block.
        lengths: [S] tokens in the cache.
        indices: int32 block ids on the device, end to end.
        bucket: of a padded decode batch.
        chunks: prompts, not decodes.
        whole: chunks only: all begin their sequences.
    """

    rows: slice
    queries: torch.Tensor
    longest: int
    blocks: torch.Tensor
    last: torch.Tensor
    lengths: torch.Tensor
    indices: torch.Tensor
    bucket: int | None = None
    chunks: bool = False
    whole: bool = False


@dataclass(frozen=True, slots=True)
class BucketBuffers:
    """What the graph of a bucket reads, int32 on the device: fixed addresses.

    Attributes:
        blocks: [bucket + 1], as of a part.
        last: [bucket], as of a part.
        indices: [bucket x W].
    """

    blocks: torch.Tensor
    last: torch.Tensor
    indices: torch.Tensor


class Staging:
    """Pinned memory for the integers of one step."""

    def __init__(self, pinned: bool) -> None:
        """Take some; it grows."""
        self._pinned = pinned
        self._used = 0
        self._allocate(4096)

    def restart(self, size: int) -> None:
        """Begin a step that takes at most `size` integers."""
        self._used = 0
        if size > self._tensor.shape[0]:
            self._allocate(2 * size)

    def put(self, values: NDArray[np.int32]) -> torch.Tensor:
        """A pinned copy of `values`."""
        begin, self._used = self._used, self._used + len(values)
        self._array[begin : self._used] = values
        return self._tensor[begin : self._used]

    def _allocate(self, size: int) -> None:
        self._tensor = torch.empty(size, dtype=torch.int32, pin_memory=self._pinned)
        self._array = self._tensor.numpy()


class Divider:
    """Divides steps into parts."""

    def __init__(
        self, block_size: int, device: torch.device, *, joint: bool, decodes: bool
    ) -> None:
        """Divide for a pool on `device`.

        Args:
            block_size: Of the pool.
            device: Of the pool.
            joint: A mixed step is one part, of chunks.
            decodes: Whether those that are apart make a part, or nothing.
        """
        self._block_size, self._device = block_size, device
        self._joint, self._decodes = joint, decodes
        pinned = device.type == "cuda"
        self._staging = (Staging(pinned), Staging(pinned))
        self.turn = 0
        self.buckets: dict[int, BucketBuffers] = {}

    def divide(self, batch: Batch) -> list[Part]:
        """Lay out a step.

        Raises:
            AttentionError: A padded batch has more blocks than its bucket's buffers.
        """
        self.turn ^= 1
        total = len(batch.query_lens)
        self._staging[self.turn].restart(4 * max(total, batch.bucket or 0) + 8)
        decodes = self.apart(batch)
        parts = []
        if decodes and self._decodes:
            if batch.bucket is not None:
                return [self._padded(batch, batch.bucket)]
            parts.append(self._part(batch, 0, decodes))
        if decodes < total:
            parts.append(self._part(batch, decodes, total, chunks=True))
        return parts

    def apart(self, batch: Batch) -> int:
        """How many of the batch's sequences, its first, are decodes apart from its chunks."""
        mixed = batch.num_decodes < len(batch.query_lens)
        return 0 if self._joint and mixed else batch.num_decodes

    def _part(self, batch: Batch, begin: int, end: int, *, chunks: bool = False) -> Part:
        """Sequences [begin, end) of the batch; those before are of one token each."""
        contexts, queries = batch.context_lens[begin:end], batch.query_lens[begin:end]
        lengths, counts, last = self._measure(np.array(contexts, dtype=np.int32))
        staging = self._staging[self.turn]
        blocks = staging.put(_running_sum(counts))
        indices = torch.empty(int(blocks[-1]), dtype=torch.int32, device=self._device)
        begins = blocks.to(self._device, non_blocking=True)
        flatten(batch.block_tables[begin:end], begins, int(counts.max()), indices)
        return Part(
            rows=slice(begin, begin + sum(queries)),
            queries=staging.put(_running_sum(np.array(queries, dtype=np.int32))),
            longest=max(queries),
            blocks=blocks,
            last=staging.put(last),
            lengths=staging.put(lengths),
            indices=indices,
            chunks=chunks,
            whole=chunks and contexts == queries,
        )

    def _padded(self, batch: Batch, bucket: int) -> Part:
        """A padded decode batch: its integers go to where the bucket's graph reads them."""
        buffers = self._buffers(bucket, batch.block_tables.shape[1])
        contexts = np.ones(bucket, dtype=np.int32)
        contexts[: len(batch.context_lens)] = batch.context_lens
        lengths, counts, last = self._measure(contexts)
        staging = self._staging[self.turn]
        blocks, last_slots = staging.put(_running_sum(counts)), staging.put(last)
        if int(blocks[-1]) > buffers.indices.shape[0]:
            raise AttentionError(
                f"a decode batch of bucket {bucket} has {int(blocks[-1])} blocks, the bucket was"
                f" first planned for {buffers.indices.shape[0]}: make its block tables as wide as"
                f" the longest sequence"
            )
        buffers.blocks.copy_(blocks, non_blocking=True)
        buffers.last.copy_(last_slots, non_blocking=True)
        flatten(batch.block_tables, buffers.blocks, int(counts.max()), buffers.indices)
        return Part(
            rows=slice(0, bucket),
            queries=blocks,
            longest=1,
            blocks=blocks,
            last=last_slots,
            lengths=staging.put(lengths),
            indices=buffers.indices,
            bucket=bucket,
        )

    def _measure(
        self, lengths: NDArray[np.int32]
    ) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
        """Of sequences of these lengths: the lengths, blocks, and slots of the last block."""
        counts = -(-lengths // self._block_size)
        return lengths, counts, lengths - (counts - 1) * self._block_size

    def _buffers(self, bucket: int, width: int) -> BucketBuffers:
        if bucket not in self.buckets:
            self.buckets[bucket] = BucketBuffers(
                blocks=torch.zeros(bucket + 1, dtype=torch.int32, device=self._device),
                last=torch.ones(bucket, dtype=torch.int32, device=self._device),
                indices=torch.zeros(bucket * width, dtype=torch.int32, device=self._device),
            )
        return self.buckets[bucket]


def _running_sum(counts: NDArray[np.int32]) -> NDArray[np.int32]:
    """[n + 1]: 0, and the sums of the first 1 .. n."""
    sums = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=sums[1:])
    return sums
