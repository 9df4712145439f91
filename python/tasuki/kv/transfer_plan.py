"""How blocks of one engine are read into blocks of another: computed once per pair, then frozen.

Each rank of an engine holds its heads of every block. A local rank reads what it
holds from the remote ranks that hold it, each pair of ranks by a plan of its
own: what the two share of a block is one slice of fixed offset and size.

    remote rank 0, heads 0-3    remote rank 1, heads 4-7
      | 0 | 1 | 2 | 3 |           | 4 | 5 | 6 | 7 |       a block on each
              \\_______\\__         /       /
                       | 2 | 3 | 4 | 5 |                  the same block on local rank 1 of 2

    remote   |  7 |  8 |  9 |    | 12 |        pairs (7,3) (8,4) (9,5) (12,6)
                 \\    \\    \\         \\           runs  (7,3,3) (12,6,1)
    local         |  3 |  4 |  5 |  6 |

Where the slice is the whole block on both sides, blocks that are adjacent on
both sides make one run: one descriptor.

Blocks of the two sides may have different sizes. Orders then count in *units*, the
greatest number of tokens that divides both sizes:

    tokens             0        16        32        48        64        80        96
    remote, 48 each    | block 7                     | block 2                     |
    local, 32 each     | block 3           | block 9           | block 4           |
    remote units       |   21    |   22    |   23    |    6    |    7    |    8    |
    local units        |    6    |    7    |   18    |   19    |    8    |    9    |

Where sizes are equal a unit is a block. Otherwise whole remote slices are read into staging
memory and their units copied into place (`repack.py`). Owns no state, runs on any thread.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tasuki.errors import TasukiError
from tasuki.v1 import kv_pb2

# What may be staged at a time of one peer with blocks of another size: enough that a GPU's
# copy engines are busy for longer than it takes to see that a piece has ended.
STAGED_BYTES = 16 << 20
_ADDRESSES = 1 << 64


class LayoutMismatchError(TasukiError):
    """Two workers' caches cannot be read into one another."""


class BlockRangeError(TasukiError):
    """A block id lies outside a pool."""


@dataclass(frozen=True, slots=True)
class Region:
    """The same slice of every block of a pool, as descriptors need it.

    Attributes:
        address: of block 0's slice, in its owner's address space.
        stride_bytes: from one block to the next.
        num_blocks: blocks in the pool.
        device: as the owner registered the pool.
        memory: as the owner registered the pool.
    """

    address: int
    stride_bytes: int
    num_blocks: int
    device: int
    memory: str


@dataclass(frozen=True, slots=True)
class Run:
    """Blocks adjacent on both sides, one descriptor.

    Where block sizes differ: units adjacent on both sides, in one block of either.
    """

    remote: int
    local: int
    count: int


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """Reads of `remote`'s slices, each of `slice_bytes`, into `local`'s.

    Attributes:
        slice_bytes: of a remote block; of a local one too where sizes are equal.
        local_tokens: in a local block.
        remote_tokens: in a remote block.
        readers: of our ranks, those that read the same remote one: they share what
            may be under way from it.
        first_head: of the model, the first of the slice.
        heads: in the slice.
    """

    slice_bytes: int
    local: Region
    remote: Region
    local_tokens: int = 1
    remote_tokens: int = 1
    readers: int = 1
    first_head: int = 0
    heads: int = 1

    @property
    def alike(self) -> bool:
        """Whether blocks of both sides have the same size."""
        return self.local_tokens == self.remote_tokens

    @property
    def unit_tokens(self) -> int:
        """Tokens in a unit, which orders count in."""
        return math.gcd(self.local_tokens, self.remote_tokens)

    @property
    def units(self) -> tuple[int, int]:
        """Units in a block, (remote, local)."""
        unit = self.unit_tokens
        return self.remote_tokens // unit, self.local_tokens // unit

    @property
    def whole_blocks(self) -> bool:
        """Whether the slice is all of a block on both sides, so that adjacent ones join."""
        return (
            self.slice_bytes == self.local.stride_bytes == self.remote.stride_bytes and self.alike
        )

    @property
    def staged_slices(self) -> int:
        """Slices that staging memory must have room for, where block sizes differ."""
        return max(2, STAGED_BYTES // self.slice_bytes)

    def limit_bytes(self, transport_bytes: int) -> int:
        """What one reader may have under way, of `transport_bytes` that the transport allows."""
        if not self.alike:
            transport_bytes = min(transport_bytes, max(STAGED_BYTES, 2 * self.slice_bytes))
        return transport_bytes // self.readers

    def piece_bytes(self, runs: Sequence[Run]) -> int:
        """Bytes that are read for a piece: of every remote block in it, its slice."""
        if self.alike:
            return sum(run.count for run in runs) * self.slice_bytes
        per_block, _ = self.units
        return len({run.remote // per_block for run in runs}) * self.slice_bytes

    def chunks(self, pairs: Sequence[tuple[int, int]], max_bytes: int) -> Iterator[list[Run]]:
        """Cut `pairs` (remote, local) of units into pieces of at most `max_bytes`, in runs.

        A piece has at least one remote block, however small `max_bytes` is.

        Raises:
            BlockRangeError: a block lies outside its pool.
        """
        self._check(pairs)
        limit = max(1, max_bytes // self.slice_bytes)
        if not self.alike:
            yield from self._staged_chunks(pairs, limit)
            return
        runs = coalesce(pairs) if self.whole_blocks else [Run(*pair, 1) for pair in sorted(pairs)]
        chunk: list[Run] = []
        room = limit
        for run in runs:
            start = 0
            while start < run.count:
                count = min(room, run.count - start)
                chunk.append(Run(run.remote + start, run.local + start, count))
                start += count
                room -= count
                if room == 0:
                    yield chunk
                    chunk, room = [], limit
        if chunk:
            yield chunk

    def _staged_chunks(self, pairs: Sequence[tuple[int, int]], limit: int) -> Iterator[list[Run]]:
        """Pieces of at most `limit` remote blocks; no run crosses a block's end."""
        theirs, ours = self.units
        chunk: list[Run] = []
        block, blocks = -1, 0
        for run in coalesce(pairs):
            start = 0
            while start < run.count:
                remote, local = run.remote + start, run.local + start
                count = min(run.count - start, theirs - remote % theirs, ours - local % ours)
                if remote // theirs != block:
                    if blocks == limit:
                        yield chunk
                        chunk, blocks = [], 0
                    block, blocks = remote // theirs, blocks + 1
                chunk.append(Run(remote, local, count))
                start += count
        if chunk:
            yield chunk

    def _check(self, pairs: Sequence[tuple[int, int]]) -> None:
        theirs, ours = self.units
        remote_end, local_end = self.remote.num_blocks * theirs, self.local.num_blocks * ours
        for remote, local in pairs:
            if not 0 <= remote < remote_end:
                raise BlockRangeError(
                    f"remote block {remote // theirs} of {self.remote.num_blocks}"
                )
            if not 0 <= local < local_end:
                raise BlockRangeError(f"local block {local // ours} of {self.local.num_blocks}")


@dataclass(frozen=True, slots=True)
class PairPlan:
    """What rank `local` here reads from rank `remote` of the other engine."""

    local: int
    remote: int
    plan: TransferPlan


def coalesce(pairs: Sequence[tuple[int, int]]) -> list[Run]:
    """Join (remote, local) pairs that are adjacent on both sides, whatever their order."""
    runs: list[Run] = []
    start_remote = start_local = count = 0
    for remote, local in sorted(pairs):
        if count and remote == start_remote + count and local == start_local + count:
            count += 1
            continue
        if count:
            runs.append(Run(start_remote, start_local, count))
        start_remote, start_local, count = remote, local, 1
    if count:
        runs.append(Run(start_remote, start_local, count))
    return runs


def make_plans(
    local: Sequence[kv_pb2.Layout], remote: Sequence[kv_pb2.Layout]
) -> tuple[PairPlan, ...]:
    """Compare both engines' layouts and settle which rank reads what from which.

    Heads that several remote ranks hold are read from one of them; the local
    ranks take turns.

    Args:
        local: of our ranks, in order; at least one.
        remote: of the prefill worker's, in order.

    Raises:
        LayoutMismatchError: naming the value of both sides.
    """
    if not remote:
        raise LayoutMismatchError("the prefill worker tells of no KV pool: run the same version")
    for other in remote:
        _compare(local[0], other)
        if other.block_size != remote[0].block_size:
            raise LayoutMismatchError(
                f"block_size is {remote[0].block_size} on one rank of the prefill worker and"
                f" {other.block_size} on another: run the same version"
            )
    ours_end, theirs_end = (max(_end(x.pool) for x in side) for side in (local, remote))
    if ours_end != theirs_end:
        raise LayoutMismatchError(
            f"the model has {ours_end} KV heads here and {theirs_end} at the prefill worker:"
            " start both with the same model"
        )
    found: list[PairPlan] = []
    for rank, layout in enumerate(local):
        ours = layout.pool
        head = ours.first_kv_head
        while head < _end(ours):
            source = _holder(remote, head, rank)
            theirs = remote[source].pool
            end = min(_end(ours), _end(theirs))
            plan = TransferPlan(
                (end - head) * _head_bytes(theirs),
                _region(ours, head),
                _region(theirs, head),
                layout.block_size,
                remote[source].block_size,
                first_head=head,
                heads=end - head,
            )
            found.append(PairPlan(rank, source, plan))
            head = end
    readers = Counter(each.remote for each in found)
    return tuple(
        replace(each, plan=replace(each.plan, readers=readers[each.remote])) for each in found
    )


def _compare(local: kv_pb2.Layout, remote: kv_pb2.Layout) -> None:
    """Raises LayoutMismatchError if heads of one cannot be those of the other."""
    if local.transport != remote.transport:
        raise LayoutMismatchError(
            f"transport is {local.transport} here and {remote.transport} at the prefill worker:"
            " start both with the same"
        )
    if list(local.groups) != list(remote.groups):
        ours_told, theirs_told = _told(local), _told(remote)
        raise LayoutMismatchError(
            f"cache groups are {ours_told} here and {theirs_told} at the prefill worker: run the"
            " same model and version"
        )
    if local.block_size != remote.block_size and any(g.state_bytes for g in local.groups):
        raise LayoutMismatchError(
            f"block_size is {local.block_size} here and {remote.block_size} at the prefill worker:"
            " layers of the model keep a state, which is not made of tokens; start both with"
            f" --block-size {max(local.block_size, remote.block_size)}"
        )
    ours, theirs = local.pool, remote.pool
    if not theirs.kv_heads or theirs.block_bytes % theirs.kv_heads:
        raise LayoutMismatchError(
            f"a block of {theirs.block_bytes} bytes has {theirs.kv_heads} KV heads"
            " at the prefill worker: run the same version"
        )
    sizes = _head_bytes(ours), _head_bytes(theirs)
    if remote.block_size < 1 or sizes[0] * remote.block_size != sizes[1] * local.block_size:
        raise LayoutMismatchError(
            f"a head of a block is {sizes[0]} bytes for {local.block_size} tokens here and"
            f" {sizes[1]} bytes for {remote.block_size} tokens at the prefill worker: start both"
            " with the same model and --kv-dtype"
        )
    if theirs.base_address + theirs.num_blocks * theirs.block_bytes > _ADDRESSES:
        raise LayoutMismatchError(
            f"a pool of {theirs.num_blocks} blocks of {theirs.block_bytes} bytes at address"
            f" {theirs.base_address:#x} of the prefill worker ends behind 64 bits of addresses"
        )


def _told(layout: kv_pb2.Layout) -> str:
    """The cache groups, for people."""
    return ", ".join(
        f"{group.kind}{f' of {group.window} tokens' if group.window else ''}"
        f"{f' of {group.state_bytes} bytes' if group.state_bytes else ''}"
        f" ({len(group.layers)} layers)"
        for group in layout.groups
    )


def _holder(remote: Sequence[kv_pb2.Layout], head: int, turn: int) -> int:
    """The rank that `head` is read from, one of those that hold it."""
    holders = [
        rank
        for rank, layout in enumerate(remote)
        if layout.pool.first_kv_head <= head < _end(layout.pool)
    ]
    if not holders:
        raise LayoutMismatchError(f"KV head {head} is held by no rank of the prefill worker")
    return holders[turn % len(holders)]


def _end(pool: kv_pb2.Pool) -> int:
    return pool.first_kv_head + pool.kv_heads


def _head_bytes(pool: kv_pb2.Pool) -> int:
    return pool.block_bytes // pool.kv_heads


def _region(pool: kv_pb2.Pool, head: int) -> Region:
    """The slice that begins with `head`."""
    offset = (head - pool.first_kv_head) * _head_bytes(pool)
    return Region(
        pool.base_address + offset,
        pool.block_bytes,
        pool.num_blocks,
        pool.device,
        pool.memory,
    )
