"""Reads of a pool that another process of this host has, by one copy from its memory to ours.

    source: pool = a segment (shm_segment.py) ──── mapped read-only ────▶ reader: copies slices
            Door (shm_door.py)  ◀── greeting, descriptor, end ──▶  Visit         to its own pool

A read is over when `post` returns: the transfer thread copies by itself. NumPy copies without the
interpreter's lock, so steps go on meanwhile. Blocks of another size are copied row by row, without
staging memory. The source takes no part in a read. As with every transport, it learns that the
reader is done by the handoff's own Release. Its death closes the connection, which every read looks
at first; what is mapped stays whole until `disconnect`.

Runs on the main thread until `register`, on the transfer thread from then on.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch

from tasuki.kv.layout import CacheLayout
from tasuki.kv.net_devices import LOCAL, Network
from tasuki.kv.reaching import Reaching
from tasuki.kv.repack import Repack
from tasuki.kv.shm_door import Door, Place, Visit
from tasuki.kv.shm_segment import Bytes, Segment, map_to_read
from tasuki.kv.staging import segments
from tasuki.kv.transfer_plan import Region, Run, TransferPlan
from tasuki.kv.transport import PoolTransport, TransportError, check_required
from tasuki.kv.ways import Way

# A piece is half of it. So long (milliseconds) the thread sees no other peer's orders.
_MAX_INFLIGHT_BYTES = 64 << 20
_WAY = Way("shm", ("memfd",))


class ShmTransport(PoolTransport["_Peer"]):
    """Reads by mapping the peer's pool; see the module.

    Metadata is JSON: the place of the process, its door, its segment.

    Args:
        network: What is required of a way; no network is used.
    """

    def __init__(self, network: Network = LOCAL) -> None:
        super().__init__("shm")
        self._network = network
        self._place = Place.here()
        self._reaching = Reaching(_reach, _leave)

    @property
    def max_inflight_bytes(self) -> int:
        """Bytes that may be under way from one peer at a time."""
        return _MAX_INFLIGHT_BYTES

    def allocate(self, layout: CacheLayout, device: torch.device | str = "cpu") -> torch.Tensor:
        """Make the pool in a segment, zeroed; one for each transport.

        Raises:
            TransportError: It would not be in host memory, or there is none to share.
        """
        self._require_host_memory(torch.device(device))
        self._segment = Segment(layout.pool_bytes)
        raw = torch.frombuffer(self._segment.memory, dtype=torch.uint8)
        return raw.view(layout.dtype).view(layout.shape)

    def register(self, pool: torch.Tensor, layout: CacheLayout) -> None:
        """Open the pool that `allocate` made to readers.

        Raises:
            TransportError: It cannot be.
        """
        self.layout = layout.to_wire(pool, transport=self.name)
        door = Door(self._segment.descriptor)
        told = {
            **asdict(self._place),
            "door": door.name,
            "key": door.key.hex(),
            "address": pool.data_ptr(),
            "bytes": layout.pool_bytes,
        }
        self.metadata = json.dumps(told).encode()
        self._bytes: Bytes = pool.detach().view(-1).view(torch.uint8).numpy()
        self._slot_bytes = pool.shape[-1] * pool.element_size()
        self.pool = pool

    def reached(self, peer: str, metadata: bytes, plan: TransferPlan) -> bool:
        """Whether the peer gave its pool's descriptor, or does not."""
        return self._reaching.done(peer, metadata)

    def connect(self, peer: str, metadata: bytes, plan: TransferPlan) -> Way | None:
        """Map a peer's pool; its metadata's digest is checked by now.

        Returns:
            Shared memory.

        Raises:
            TransportError: It is elsewhere, or does not give us its pool.
        """
        told = _Told.of(peer, metadata)
        self._place.check(peer, told.place)
        check_required(_WAY, self._network.require, peer)
        _check_inside(plan.remote, plan.slice_bytes, told.address, told.size_bytes)
        repack = None if plan.alike else Repack.of(plan, self._slot_bytes)
        visit = self._reaching.take(peer, metadata)
        try:
            mapped = map_to_read(visit.descriptor, told.size_bytes)
        except TransportError:
            visit.end()
            raise
        finally:
            os.close(visit.descriptor)
        self._peers[peer] = _Peer(visit, plan, mapped, told.address, repack)
        return _WAY

    def disconnect(self, peer: str) -> None:
        """Unmap a peer's pool."""
        self._reaching.forget(peer)
        known = self._peers.pop(peer, None)
        if known is not None:
            known.visit.end()

    def post(self, peer: str, runs: Sequence[Run]) -> ShmRead:
        """Read; all bytes are here when this returns.

        Raises:
            TransportError: The peer is not there.
        """
        known = self._connected(peer)
        known.visit.require_alive()
        if known.repack is None:
            self._copy(runs, known)
        else:
            self._copy_rows(runs, known, known.repack)
        return ShmRead()

    def _copy(self, runs: Sequence[Run], peer: _Peer) -> None:
        ours = self.layout.pool.base_address
        for each in segments(runs, peer.plan):
            here, there = each.local - ours, each.remote - peer.address
            self._bytes[here : here + each.size_bytes] = peer.mapped[
                there : there + each.size_bytes
            ]

    def _copy_rows(self, runs: Sequence[Run], peer: _Peer, repack: Repack) -> None:
        ours, theirs, planes = self.layout.pool.base_address, peer.plan.remote, repack.planes
        for block, of_block in repack.blocks(runs):
            at = theirs.address - peer.address + block * theirs.stride_bytes
            for row in repack.rows(of_block, at, range(planes)):
                shape = (row.count, row.size_bytes)
                here = _rows(self._bytes, row.local - ours, row.local_stride, shape)
                here[:] = _rows(peer.mapped, row.staged, row.staged_stride, shape)


@dataclass(frozen=True, slots=True)
class _Told:
    """A peer's metadata: where it is, its door, its segment."""

    place: Place
    door: str
    key: bytes
    address: int
    size_bytes: int

    @classmethod
    def of(cls, peer: str, metadata: bytes) -> _Told:
        """Read it.

        Raises:
            TransportError: It is none.
        """
        try:
            told = json.loads(metadata)
            place = Place(str(told["host"]), str(told["network"]), str(told["users"]))
            key, address = bytes.fromhex(told["key"]), int(told["address"])
            return cls(place, str(told["door"]), key, address, int(told["bytes"]))
        except (ValueError, KeyError, TypeError) as error:
            raise TransportError(f"{peer} tells of no shared memory ({error})") from error


def _reach(peer: str, metadata: bytes) -> Visit:
    told = _Told.of(peer, metadata)
    return Visit(peer, told.door, told.key)


def _leave(visit: Visit) -> None:
    os.close(visit.descriptor)
    visit.end()


class ShmRead:
    """A read that is over; made by `ShmTransport.post`."""

    def done(self) -> bool:
        """It is."""
        return True


@dataclass(frozen=True, slots=True)
class _Peer:
    """A peer: its connection, its mapped pool and where that begins in the peer's own addresses.

    `repack`: its blocks have another size.
    """

    visit: Visit
    plan: TransferPlan
    mapped: Bytes
    address: int
    repack: Repack | None


def _rows(
    memory: Bytes, offset: int, stride: int, shape: tuple[int, int]
) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    """Rows of bytes at a stride; NumPy refuses what is not inside of `memory`."""
    return np.ndarray(shape, np.uint8, memory, offset, (stride, 1))


def _check_inside(theirs: Region, slice_bytes: int, address: int, size_bytes: int) -> None:
    """Refuse slices outside of the memory that the peer has for readers.

    Raises:
        TransportError: There is one.
    """
    end = theirs.address + (theirs.num_blocks - 1) * theirs.stride_bytes + slice_bytes
    if theirs.address < address or end > address + size_bytes:
        raise TransportError(
            f"the peer's blocks lie from {theirs.address:#x} to {end:#x}, its shared memory of"
            f" {size_bytes} bytes begins at {address:#x}: run the same version"
        )
