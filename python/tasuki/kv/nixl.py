"""One-sided reads by NIXL, from pool to pool.

Owns the registration of the pool, and of staging memory for peers with blocks of another size
(`staged_reads.py`). Runs on the main thread until `register`, on the transfer thread from then on.

What a peer and we exchange of each block is one strided descriptor list on
either side, so index i of a prepared list is block i, on our side and on the
peer's; NIXL merges adjacent indices into one descriptor where the slice is the
whole block on both sides. Blocks of another size are staged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tasuki.kv.cuda_ipc import TICKET_BYTES, Mapping, ticket
from tasuki.kv.layout import CacheLayout
from tasuki.kv.net_devices import LOCAL, Network
from tasuki.kv.nixl_agent import OWN, Agent, NixlRead, Piece, RemoteAgent, describe
from tasuki.kv.pool_copies import PoolCopies
from tasuki.kv.reaching import Joining, Steps
from tasuki.kv.repack import Repack
from tasuki.kv.staged_reads import StagedPeer, StagedRead, StagingMemory
from tasuki.kv.transfer_plan import Region, Run, TransferPlan
from tasuki.kv.transport import PoolTransport, TransportError
from tasuki.kv.ways import Way

# More than this under way over TCP, and the death of the reader can take the source with it.
_MAX_INFLIGHT_DRAM_BYTES = 16 << 20
# Over CUDA IPC the reader's own copy engines do the work: enough that NVLink (390 GB/s) is
# busy for milliseconds, far longer than it takes to see that a piece has ended.
_MAX_INFLIGHT_VRAM_BYTES = 1 << 30
_PROBE_BYTES = 4096  # what is read of a peer to see how its blocks travel


class NixlTransport(PoolTransport["_Peer"]):
    """One-sided reads by NIXL. Metadata maps the pool on this machine, then is the agent's.

    Args:
        network: What transfers may use.
        backend: NIXL plugin that moves the bytes.

    Raises:
        TransportError: NIXL or the backend is not there; says what is.
    """

    def __init__(self, network: Network = LOCAL, backend: str = "UCX") -> None:
        super().__init__("nixl")
        self._agent = Agent(network, backend)
        self._local: dict[tuple[Region, int], Any] = {}  # prepared slices of our blocks
        self._memory = "DRAM"
        self._device = torch.device("cpu")
        self._joining = Joining(self._join, self._leave)

    @property
    def max_inflight_bytes(self) -> int:
        """Bytes that may be under way from one peer at a time."""
        return _MAX_INFLIGHT_DRAM_BYTES if self._memory == "DRAM" else _MAX_INFLIGHT_VRAM_BYTES

    def register(self, pool: torch.Tensor, layout: CacheLayout) -> None:
        """Register `pool`, once; it stays mapped for the life of the process.

        Raises:
            TransportError: NIXL refuses the memory.
        """
        self.layout = layout.to_wire(pool, transport=f"nixl/{self._agent.backend}")
        place = self.layout.pool
        region = (place.base_address, layout.pool_bytes, place.device)
        self._agent.register(region, place.memory, pool)
        self.metadata = ticket(pool) + self._agent.metadata
        self._staging = StagingMemory(self._open, pool)
        self._copies = PoolCopies(pool)  # of the transfer thread
        self._scratch = torch.empty(_PROBE_BYTES, dtype=torch.uint8, device=pool.device)
        self._memory = place.memory
        self._open(self._scratch)
        self._device = pool.device
        self.pool = pool

    def reached(self, peer: str, metadata: bytes, plan: TransferPlan) -> bool:
        """Whether a few bytes of the peer were read, or do not come soon.

        Raises:
            TransportError: NIXL refuses the metadata, or the peer cannot be reached.
        """
        return self._joining.done(peer, metadata, plan)

    def connect(self, peer: str, metadata: bytes, plan: TransferPlan) -> Way | None:
        """Load a peer's metadata (its digest is checked by now) and prepare its blocks.

        Returns:
            How its blocks will travel, where that is known.

        Raises:
            TransportError: NIXL refuses it, or the peer cannot be reached.
        """
        known = self._peers[peer] = self._joining.take(peer, metadata, plan)
        return known.way

    def _join(self, peer: str, metadata: bytes, plan: TransferPlan) -> Steps[_Peer]:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # this thread's, for UCX's copies
        mapping = Mapping(metadata[:TICKET_BYTES])
        try:
            with self._agent.connecting(peer, metadata[TICKET_BYTES:]) as remote:
                way = yield from self._way(peer, metadata[TICKET_BYTES:], remote, plan)
                theirs = self._agent.prepare(remote, plan.remote, plan.slice_bytes)
                if plan.alike:
                    ours, staged = self._prepared(plan.local, plan.slice_bytes), None
                else:
                    ours, staged = None, self._staged(plan, theirs)
                return _Peer(remote, ours, theirs, mapping, way, staged)
        except BaseException:
            mapping.close()
            raise

    def _way(
        self, peer: str, metadata: bytes, remote: RemoteAgent, plan: TransferPlan
    ) -> Steps[Way | None]:
        size, theirs = min(_PROBE_BYTES, plan.slice_bytes), plan.remote
        here = Piece(self._scratch.data_ptr(), size, plan.local.device, self._memory)
        there = Piece(theirs.address, size, theirs.device, theirs.memory)
        return self._agent.check_way(peer, metadata, remote, here, there)

    def disconnect(self, peer: str) -> None:
        """Forget a peer's metadata; nothing is under way from it."""
        self._joining.forget(peer)
        known = self._peers.pop(peer, None)
        if known is not None:
            self._leave(known)

    def _leave(self, known: _Peer) -> None:
        known.remote.release()
        self._agent.forget(known.agent)
        known.mapping.close()
        if known.staged is not None:
            self._staging.give_back(known.staged.memory)

    def post(self, peer: str, runs: Sequence[Run]) -> NixlRead | StagedRead:
        """Begin to read; over CMA the bytes are here, or staged, when this returns.

        Raises:
            TransportError: the peer is not there.
        """
        known = self._connected(peer)
        try:
            if known.staged is not None:
                return known.staged.read(runs)
            return self._agent.read_prepared(
                (known.local, _indices([(run.local, run.count) for run in runs])),
                (known.remote, _indices([(run.remote, run.count) for run in runs])),
            )
        except Exception as error:
            raise TransportError(f"NIXL read from {peer}: {describe(error)}") from error

    def _open(self, memory: torch.Tensor) -> None:
        """Register memory beside the pool, on its device; shape [bytes], uint8."""
        region = (memory.data_ptr(), memory.numel(), memory.device.index or 0)
        self._agent.register(region, self._memory, memory)

    def _prepared(self, region: Region, slice_bytes: int) -> Any:
        """Our side's slices, kept for the next peer that needs the same."""
        key = (region, slice_bytes)
        if key not in self._local:
            self._local[key] = self._agent.prepare(OWN, *key)
        return self._local[key]

    def _staged(self, plan: TransferPlan, theirs: Any) -> StagedPeer:
        """Staging memory for a peer whose slices are `theirs`."""
        repack = Repack.of(plan, self._copies.slot_bytes)
        memory = self._staging.take(plan)
        ours = self._prepared(self._staging.region(memory, plan), plan.slice_bytes)

        def read_slices(slots: Sequence[int], blocks: Sequence[int]) -> NixlRead:
            here, there = (np.array(each, dtype=np.int32) for each in (slots, blocks))
            return self._agent.read_prepared((ours, here), (theirs, there))

        free = list(range(plan.staged_slices))
        return StagedPeer(self._copies, repack, memory, read_slices, free)


@dataclass(frozen=True, slots=True)
class _Peer:
    """A loaded remote agent, both sides' prepared slices, its pool if it is on a GPU here.

    `way`: how its blocks travel, where that is known. `staged`: its blocks have another size.
    """

    agent: RemoteAgent
    local: Any
    remote: Any
    mapping: Mapping
    way: Way | None
    staged: StagedPeer | None = None


def _indices(spans: Sequence[tuple[int, int]]) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.concatenate([np.arange(s, s + n, dtype=np.int32) for s, n in spans])
