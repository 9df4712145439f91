"""How blocks of one engine are read into blocks of another: computed once per pair, then frozen.

    remote   |  7 |  8 |  9 |    | 12 |        pairs (7,3) (8,4) (9,5) (12,6)
                 \\    \\    \\         \\           runs  (7,3,3) (12,6,1)
    local         |  3 |  4 |  5 |  6 |

Blocks that are adjacent on both sides make one run: one descriptor. Owns no
state, runs on any thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tasuki.errors import TasukiError
from tasuki.v1 import kv_pb2


class LayoutMismatchError(TasukiError):
    """Two workers' caches cannot be read into one another."""


class BlockRangeError(TasukiError):
    """A block id lies outside a pool."""


@dataclass(frozen=True, slots=True)
class Region:
    """A pool as descriptors need it. Addresses are of its owner's address space."""

    base_address: int
    num_blocks: int
    device: int
    memory: str


@dataclass(frozen=True, slots=True)
class Run:
    """Blocks adjacent on both sides."""

    remote: int
    local: int
    count: int


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """Reads of `remote`'s blocks into `local`'s; both hold blocks of `block_bytes`."""

    block_bytes: int
    local: Region
    remote: Region

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
        limit = max(1, max_bytes // self.block_bytes)
        chunk: list[Run] = []
        room = limit
        for run in coalesce(pairs):
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


def make_plan(local: kv_pb2.Layout, remote: kv_pb2.Layout) -> TransferPlan:
    """Compare both layouts and settle how blocks are read.

    Raises:
        LayoutMismatchError: naming the value of both sides.
    """
    for name in ("transport", "block_size", "tensor_parallel_size"):
        ours, theirs = getattr(local, name), getattr(remote, name)
        if ours != theirs:
            raise LayoutMismatchError(
                f"{name} is {ours} here and {theirs} at the prefill worker:"
                " start both with the same"
            )
    kinds = [g.kind for g in local.groups], [g.kind for g in remote.groups]
    if kinds[0] != kinds[1] or len(kinds[0]) != 1:
        raise LayoutMismatchError(
            f"cache groups are {kinds[0]} here and {kinds[1]} at the prefill worker:"
            " one group of one kind can be read"
        )
    ours, theirs = local.groups[0], remote.groups[0]
    if ours.block_bytes != theirs.block_bytes or list(ours.layers) != list(theirs.layers):
        raise LayoutMismatchError(
            f"a block is {ours.block_bytes} bytes of {len(ours.layers)} layers here and"
            f" {theirs.block_bytes} bytes of {len(theirs.layers)} layers at the prefill worker"
        )
    return TransferPlan(ours.block_bytes, _region(ours), _region(theirs))


def _region(group: kv_pb2.Group) -> Region:
    return Region(group.base_address, group.num_blocks, group.device, group.memory)
