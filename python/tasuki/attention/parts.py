"""A step's chunks of prompts, in the arrays that paged attention kernels take.

Lengths are laid out on the host in pinned memory; block ids are laid end to end
on the device, where their tables are already. For a CUDA graph the arrays have one
size, and the tables stay as they are, gaps included:

    queries   | d | d+q0 | d+q0+q1 | same .. |     d decodes come before
    blocks    | 0 | w    | 2w      | same .. |     tables of width w
    lengths   | k0 | k1 | 0 ..               |     0: nobody

FlashInfer's FA2 kernels take a sequence's length from its blocks, and write the queries' results
from the first row on. For them the block ids lie end to end, and two sequences without blocks
come first: an empty one, which programs without work belong to, and one whose queries are
the decodes; what it leaves there is overwritten.

    queries   | 0 | 0 | d | d+q0 | d+q0+q1 | same .. |
    blocks    | 0 | 0 | 0 | n0   | n0+n1   | same .. |

Owns the pinned memory, of which there is two in turn: a step in flight may still
have its copies before it. Runs on the engine thread.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from tasuki.attention.batch import Batch, StepLimits

_WIDTH = 256  # entries of a program


@triton.jit  # type: ignore[untyped-decorator]
def _flatten(tables, row_stride, begins, flat, width: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    begin = tl.load(begins + row)
    count = tl.load(begins + row + 1) - begin
    at = tl.program_id(1) * width + tl.arange(0, width)
    mask = at < count
    blocks = tl.load(tables + row * row_stride + at, mask=mask)
    tl.store(flat + begin + at, blocks, mask=mask)


def flatten(
    tables: torch.Tensor, begins: torch.Tensor, longest_blocks: int, flat: torch.Tensor
) -> None:
    """Write `tables[s, : begins[s + 1] - begins[s]]` to `flat` from `begins[s]` on.

    Args:
        tables: [S, W] int32, entries of a row adjacent.
        begins: [S + 1] int32, on the device.
        longest_blocks: the most entries of a row.
        flat: [at least begins[S]] int32.
    """
    grid = (begins.shape[0] - 1, triton.cdiv(longest_blocks, _WIDTH))
    _flatten[grid](tables, tables.stride(0), begins, flat, width=_WIDTH)


@dataclass(frozen=True, slots=True)
class Chunks:
    """Some sequences of a step, for one call; arrays are pinned int32 on the host.

    Attributes:
        rows: of the batch's tokens that the call gets; those before them are decodes.
        queries: [S + 1] where each sequence's queries begin.
        longest: the most queries of a sequence.
        blocks: [S + 1] where each sequence's block ids begin; they may end before the next begin.
        last: [S] slots used in each sequence's last block.
        lengths: [S] tokens in the cache.
        arrays: blocks, queries, last and lengths, one behind the other.
        indices: int32 block ids on the device.
        whole: all begin their sequences.
    """

    rows: slice
    queries: torch.Tensor
    longest: int
    blocks: torch.Tensor
    last: torch.Tensor
    lengths: torch.Tensor
    arrays: torch.Tensor
    indices: torch.Tensor
    whole: bool


_LEAD = 2  # sequences before the chunks, for FA2


def fixed_sequences(limits: StepLimits, *, exact: bool) -> int:
    """Sequences of the arrays of a step in a CUDA graph."""
    return limits.chunks + (_LEAD if exact else 0)


class _Pinned:
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

    def all(self) -> torch.Tensor:
        """What was put since the step began, in this order."""
        return self._tensor[: self._used]

    def _allocate(self, size: int) -> None:
        self._tensor = torch.empty(size, dtype=torch.int32, pin_memory=self._pinned)
        self._array = self._tensor.numpy()


class Divider:
    """Takes steps' chunks apart from their decodes.

    Attributes:
        turn: 0 and 1, one after the other: which of two things is this step's.
    """

    def __init__(
        self, block_size: int, device: torch.device, *, joint: bool, exact: bool = False
    ) -> None:
        """For a pool on `device`.

        Args:
            block_size: Tokens of a block.
            device: Of the pool.
            joint: Where there are chunks, decodes go with them.
            exact: For CUDA graphs block ids lie end to end, as FA2 takes them.
        """
        self._block_size, self._device, self._joint = block_size, device, joint
        self._exact = exact
        pinned = device.type == "cuda"
        self._staging = (_Pinned(pinned), _Pinned(pinned))
        self.turn = 0

    def chunks(self, batch: Batch) -> Chunks | None:
        """Lay out a step's chunks; None: it has decodes alone, and no limits."""
        self.turn ^= 1
        if batch.limits is not None:
            lay_out = self._exact_arrays if self._exact else self._fixed
            return lay_out(batch, batch.limits)
        begin = batch.num_decodes
        if begin == len(batch.query_lens):
            return None
        if self._joint:
            begin = 0
        contexts, queries = batch.context_lens[begin:], batch.query_lens[begin:]
        staging = self._staging[self.turn]
        staging.restart(4 * len(queries) + 2)
        lengths = np.array(contexts, dtype=np.int32)
        counts = -(-lengths // self._block_size)
        blocks = staging.put(_running_sum(counts))
        indices = torch.empty(int(blocks[-1]), dtype=torch.int32, device=self._device)
        begins = blocks.to(self._device, non_blocking=True)
        flatten(batch.block_tables[begin:], begins, int(counts.max()), indices)
        return Chunks(
            rows=slice(begin, begin + sum(queries)),
            queries=staging.put(_running_sum(np.array(queries, dtype=np.int32))),
            longest=max(queries),
            blocks=blocks,
            last=staging.put(lengths - (counts - 1) * self._block_size),
            lengths=staging.put(lengths),
            arrays=staging.all(),
            indices=indices,
            whole=contexts == queries,
        )

    def _fixed(self, batch: Batch, limits: StepLimits) -> Chunks:
        """Arrays of as many sequences as there may be, and all of the step's tokens."""
        begin, width = batch.num_decodes, batch.block_tables.shape[1]
        queries = batch.query_lens[begin:]
        spare = limits.chunks - len(queries)
        staging = self._staging[self.turn]
        staging.restart(4 * limits.chunks + 2)
        lengths = np.array([*batch.context_lens[begin:], *[0] * spare], dtype=np.int32)
        steps = np.array([*queries, *[0] * spare], dtype=np.int32)
        begins = np.minimum(np.arange(limits.chunks + 1, dtype=np.int32), len(queries)) * width
        blocks = staging.put(begins)
        return Chunks(
            rows=slice(0, len(batch.tokens)),
            queries=staging.put(begin + _running_sum(steps)),
            longest=max(queries, default=0),
            blocks=blocks,
            last=staging.put(np.ones(limits.chunks, dtype=np.int32)),  # unread: `lengths` counts
            lengths=staging.put(lengths),
            arrays=staging.all(),
            indices=batch.block_tables[begin:].reshape(-1),
            whole=False,
        )

    def _exact_arrays(self, batch: Batch, limits: StepLimits) -> Chunks:
        """As `_fixed`, with block ids end to end behind two sequences without blocks."""
        begin = batch.num_decodes
        queries, contexts = batch.query_lens[begin:], batch.context_lens[begin:]
        spare = [0] * (limits.chunks - len(queries))
        staging = self._staging[self.turn]
        staging.restart(4 * (limits.chunks + _LEAD) + 2)
        lengths = np.array([0, 0, *contexts, *spare], dtype=np.int32)
        counts = -(-lengths // self._block_size)
        blocks = staging.put(_running_sum(counts))
        indices = torch.empty(max(int(blocks[-1]), 1), dtype=torch.int32, device=self._device)
        if queries:
            begins = blocks[_LEAD : _LEAD + len(queries) + 1].to(self._device, non_blocking=True)
            flatten(batch.block_tables[begin:], begins, int(counts.max()), indices)
        return Chunks(
            rows=slice(0, len(batch.tokens)),
            queries=staging.put(_running_sum(np.array([0, begin, *queries, *spare], np.int32))),
            longest=max([begin, *queries]),
            blocks=blocks,
            last=staging.put(lengths - (counts - 1) * self._block_size),
            lengths=staging.put(lengths),
            arrays=staging.all(),
            indices=indices,
            whole=False,
        )


def _running_sum(counts: NDArray[np.int32]) -> NDArray[np.int32]:
    """[n + 1]: 0, and the sums of the first 1 .. n."""
    sums = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=sums[1:])
    return sums
