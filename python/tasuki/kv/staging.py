"""Host memory that blocks pass through where GPUs cannot read one another, and the copies.

    pool of the source ──copy──▶ slot there ──read──▶ slot here ──copy──▶ our pool
       (device)                  (pinned host)        (pinned host)       (device)

A transfer is cut into *parts*, each of which fills one slot on either side; several are under
way, so that the copies and the read of different parts overlap. The slots of a worker are one
registered stretch of memory: a *set* for every reader of it, and a set for every peer that it
reads itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from tasuki.kv.pool_copies import Rows
from tasuki.kv.repack import Repack
from tasuki.kv.transfer_plan import Run, TransferPlan
from tasuki.kv.transport import TransportError

SLOT_BYTES = 2 << 20
LANES = 4  # slots of a set: parts under way between two workers
MAX_PEERS = 16


@dataclass(frozen=True, slots=True)
class Segment:
    """Adjacent bytes of both pools, by their owners' addresses."""

    remote: int
    local: int
    size_bytes: int


def parts_of(
    runs: Sequence[Run], plan: TransferPlan, slot_bytes: int = SLOT_BYTES
) -> Iterator[list[Segment]]:
    """Cut the slices of `runs` into parts of at most `slot_bytes`."""
    part: list[Segment] = []
    room = slot_bytes
    for segment in segments(runs, plan):
        begin = 0
        while begin < segment.size_bytes:
            size = min(room, segment.size_bytes - begin)
            part.append(Segment(segment.remote + begin, segment.local + begin, size))
            begin, room = begin + size, room - size
            if not room:
                yield part
                part, room = [], slot_bytes
    if part:
        yield part


def segments(runs: Sequence[Run], plan: TransferPlan) -> Iterator[Segment]:
    """The bytes of `runs`, of blocks of equal sizes."""
    remote, local = plan.remote, plan.local
    for run in runs:
        joined = plan.whole_blocks
        for index in range(1 if joined else run.count):
            yield Segment(
                remote.address + (run.remote + index) * remote.stride_bytes,
                local.address + (run.local + index) * local.stride_bytes,
                plan.slice_bytes * (run.count if joined else 1),
            )


@dataclass(slots=True)
class PlanesPart:
    """What fills one slot, of blocks of another size: whole planes.

    Attributes:
        stretches: (address, bytes) of the peer's pool, which follow one another in the slot.
        rows: the copies from the slot to our pool.
    """

    stretches: list[tuple[int, int]]
    rows: list[Rows]


def parts_of_planes(
    runs: Sequence[Run], repack: Repack, slot_bytes: int = SLOT_BYTES
) -> Iterator[PlanesPart]:
    """Cut the slices of blocks of another size into parts of at most `slot_bytes`.

    Raises:
        TransportError: A plane does not fit.
    """
    remote, plane_bytes = repack.plan.remote, repack.plane_bytes
    most = slot_bytes // plane_bytes
    if most == 0:
        raise TransportError(
            f"blocks of {repack.plan.remote_tokens} tokens at the prefill worker are not read"
            f" into blocks of {repack.plan.local_tokens} tokens: a layer of one is {plane_bytes}"
            f" bytes, a slot of host memory {slot_bytes}: give both workers the same --block-size"
        )
    part, room = PlanesPart([], []), most
    for block, of_block in repack.blocks(runs):
        begin = 0
        while begin < repack.planes:
            planes = range(begin, min(repack.planes, begin + room))
            address = remote.address + block * remote.stride_bytes + begin * plane_bytes
            part.rows += repack.rows(of_block, (most - room) * plane_bytes, planes)
            part.stretches.append((address, len(planes) * plane_bytes))
            begin, room = planes.stop, room - len(planes)
            if not room:
                yield part
                part, room = PlanesPart([], []), most
    if part.stretches:
        yield part


class Slots:
    """The slots of one worker: `MAX_PEERS` sets for its readers, then as many for itself."""

    def __init__(self, pinned: bool) -> None:
        """Allocate them; `pinned`: as copies to and from a GPU need them."""
        count = 2 * MAX_PEERS * LANES
        self.memory = torch.empty(count * SLOT_BYTES, dtype=torch.uint8, pin_memory=pinned)
        self.memory.zero_()  # touched now, and not during the first transfers

    def slot(self, of_set: int, lane: int) -> torch.Tensor:
        """One slot; sets of readers are 0 .. MAX_PEERS - 1, own ones follow."""
        begin = slot_offset(of_set, lane)
        return self.memory[begin : begin + SLOT_BYTES]


def slot_offset(of_set: int, lane: int) -> int:
    """Bytes from the beginning of a worker's slots."""
    return (of_set * LANES + lane) * SLOT_BYTES
