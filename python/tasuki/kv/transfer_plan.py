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
both sides make one run: one descriptor. Owns no state, runs on any thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tasuki.errors import TasukiError
from tasuki.v1 import kv_pb2

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
    """Blocks adjacent on both sides, one descriptor."""

    remote: int
    local: int
    count: int


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """Reads of `remote`'s slices into `local`'s, each of `slice_bytes`.

    Attributes:
        readers: of our ranks, those that read the same remote one: they share what
            may be under way from it.
    """

    slice_bytes: int
    local: Region
    remote: Region
    readers: int = 1

    @property
    def whole_blocks(self) -> bool:
        """Whether the slice is all of a block on both sides, so that adjacent ones join."""
        return self.slice_bytes == self.local.stride_bytes == self.remote.stride_bytes

    def chunks(self, pairs: Sequence[tuple[int, int]], max_bytes: int) -> Iterator[list[Run]]:
        """Cut `pairs` (remote, local) into pieces of at most `max_bytes`, in runs.

        A piece has at least one block, however small `max_bytes` is.

        Raises:
            BlockRangeError: a block lies outside its pool.
        """
        for remote, local in pairs:
            if not 0 <= remote < self.remote.num_blocks:
                raise BlockRangeError(f"remote block {remote} of {self.remote.num_blocks}")
            if not 0 <= local < self.local.num_blocks:
                raise BlockRangeError(f"local block {local} of {self.local.num_blocks}")
        limit = max(1, max_bytes // self.slice_bytes)
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
                (end - head) * _head_bytes(ours), _region(ours, head), _region(theirs, head)
            )
            found.append(PairPlan(rank, source, plan))
            head = end
    readers = Counter(each.remote for each in found)
    return tuple(
        replace(each, plan=replace(each.plan, readers=readers[each.remote])) for each in found
    )


def _compare(local: kv_pb2.Layout, remote: kv_pb2.Layout) -> None:
    """Raises LayoutMismatchError if heads of one cannot be those of the other."""
    for name in ("transport", "block_size"):
        ours, theirs = getattr(local, name), getattr(remote, name)
        if ours != theirs:
            raise LayoutMismatchError(
                f"{name} is {ours} here and {theirs} at the prefill worker:"
                " start both with the same"
            )
    if list(local.groups) != list(remote.groups):
        ours_told, theirs_told = _told(local), _told(remote)
        raise LayoutMismatchError(
            f"cache groups are {ours_told} here and {theirs_told} at the prefill worker: run the"
            " same model and version"
        )
    ours, theirs = local.pool, remote.pool
    if not theirs.kv_heads or theirs.block_bytes % theirs.kv_heads:
        raise LayoutMismatchError(
            f"a block of {theirs.block_bytes} bytes has {theirs.kv_heads} KV heads"
            " at the prefill worker: run the same version"
        )
    sizes = _head_bytes(ours), _head_bytes(theirs)
    if sizes[0] != sizes[1]:
        raise LayoutMismatchError(
            f"a head of a block is {sizes[0]} bytes here and {sizes[1]} bytes at the prefill worker"
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
