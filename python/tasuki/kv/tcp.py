"""Reads of a pool by TCP of our own: one copy by the kernel on either side, no library.

    source: pool ──── sendmsg ───▶ connections ──── recvmsg ───▶ reader: pool
            TcpSource (tcp_source.py)               TcpPeer (tcp_reader.py)

Blocks of another size pass through staging memory (`staged_reads.py`). A source takes no part in a
read beyond its threads of `tcp_source.py`, which send. As with every transport, it learns that the
reader is done by the handoff's own Release.

Runs on the main thread until `register`, on the transfer thread from then on; peers are connected
to by threads of `reaching.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tasuki.kv.layout import CacheLayout
from tasuki.kv.net_devices import LOCAL, Network
from tasuki.kv.pool_copies import PoolCopies
from tasuki.kv.reaching import Reaching
from tasuki.kv.repack import Repack
from tasuki.kv.staged_reads import StagedPeer, StagedRead, StagingMemory
from tasuki.kv.staging import segments
from tasuki.kv.tcp_reader import TcpPeer, TcpRead
from tasuki.kv.tcp_source import TcpSource
from tasuki.kv.transfer_plan import Run, TransferPlan
from tasuki.kv.transport import PoolTransport, TransportError, address_for_peers, check_required
from tasuki.kv.ways import Way

_MAX_INFLIGHT_BYTES = 16 << 20  # as much as NIXL over TCP

_Begin = Callable[[Sequence[Run]], TcpRead | StagedRead]


class TcpTransport(PoolTransport["_Peer"]):
    """Reads by plain sockets; see the module.

    Metadata is JSON: where the source listens, and its key.

    Args:
        network: What transfers may use; its host is the address that peers connect to.

    Raises:
        TransportError: Peers cannot connect to that.
    """

    def __init__(self, network: Network = LOCAL) -> None:
        super().__init__("tcp")
        self._network = network
        self._host = str(address_for_peers(self.name, network.host))
        self._reaching = Reaching(_reach, TcpPeer.end)

    @property
    def max_inflight_bytes(self) -> int:
        """Bytes that may be under way from one peer at a time."""
        return _MAX_INFLIGHT_BYTES

    def register(self, pool: torch.Tensor, layout: CacheLayout) -> None:
        """Open `pool` to readers, once, for the life of the process.

        Raises:
            TransportError: It is not in host memory, or the address cannot be bound.
        """
        self._require_host_memory(pool.device)
        self.layout = layout.to_wire(pool, transport=self.name)
        self._memory = _bytes_of(pool)
        source = TcpSource(self._host, self._memory, pool.data_ptr())
        told = {"host": self._host, "port": source.port, "key": source.key.hex()}
        self.metadata = json.dumps(told).encode()
        self._staging = StagingMemory(lambda _: None, pool)  # only our threads write to it
        self._copies = PoolCopies(pool)  # of the transfer thread
        self.pool = pool

    def reached(self, peer: str, metadata: bytes, plan: TransferPlan) -> bool:
        """Whether the connections are there, or cannot be made."""
        return self._reaching.done(peer, metadata)

    def connect(self, peer: str, metadata: bytes, plan: TransferPlan) -> Way | None:
        """Connect to a peer; its metadata's digest is checked by now.

        Returns:
            TCP to its address.

        Raises:
            TransportError: It cannot be reached, is another process by now, or TCP is not allowed.
        """
        (host, _), _ = _source(peer, metadata)
        way = Way("tcp", (f"socket/{host}",))
        check_required(way, self._network.require, peer)
        repack = None if plan.alike else Repack.of(plan, self._copies.slot_bytes)
        connections = self._reaching.take(peer, metadata)
        self.disconnect(peer)
        if repack is None:
            self._peers[peer] = _Peer(connections, self._slices_of(connections, plan))
        else:
            memory = self._staging.take(plan)
            begin = self._staged(connections, repack, memory)
            self._peers[peer] = _Peer(connections, begin, memory)
        return way

    def disconnect(self, peer: str) -> None:
        """Leave a peer; nothing is under way from it."""
        self._reaching.forget(peer)
        known = self._peers.pop(peer, None)
        if known is not None:
            known.connections.end()
            if known.staging is not None:
                self._staging.give_back(known.staging)

    def post(self, peer: str, runs: Sequence[Run]) -> TcpRead | StagedRead:
        """Begin to read.

        Raises:
            TransportError: The peer is not there.
        """
        return self._connected(peer).begin(runs)

    def _slices_of(self, connections: TcpPeer, plan: TransferPlan) -> _Begin:
        def begin(runs: Sequence[Run]) -> TcpRead:
            rows = [(each.local, each.remote, each.size_bytes) for each in segments(runs, plan)]
            return connections.read(rows, self._memory, self.pool.data_ptr())

        return begin

    def _staged(self, connections: TcpPeer, repack: Repack, memory: torch.Tensor) -> _Begin:
        plan, staged, address = repack.plan, _bytes_of(memory), memory.data_ptr()
        size, theirs = plan.slice_bytes, plan.remote

        def read_slices(slots: Sequence[int], blocks: Sequence[int]) -> TcpRead:
            rows = [
                (address + slot * size, theirs.address + block * theirs.stride_bytes, size)
                for slot, block in zip(slots, blocks, strict=True)
            ]
            return connections.read(rows, staged, address)

        free = list(range(plan.staged_slices))
        return StagedPeer(self._copies, repack, memory, read_slices, free).read


@dataclass(frozen=True, slots=True)
class _Peer:
    """A peer's connections, how a piece of it is read, its staging memory if it has any."""

    connections: TcpPeer
    begin: _Begin
    staging: torch.Tensor | None = None


def _source(peer: str, metadata: bytes) -> tuple[tuple[str, int], bytes]:
    """Where a peer's source listens, and its key.

    Raises:
        TransportError: The metadata does not say so.
    """
    try:
        told = json.loads(metadata)
        return (str(told["host"]), int(told["port"])), bytes.fromhex(told["key"])
    except (ValueError, KeyError, TypeError) as error:
        raise TransportError(f"{peer} tells of no TCP source ({error})") from error


def _reach(peer: str, metadata: bytes) -> TcpPeer:
    return TcpPeer(peer, *_source(peer, metadata))


def _bytes_of(memory: torch.Tensor) -> memoryview:
    """Host memory as bytes; keeps it."""
    of_bytes: Any = memory.detach().view(-1).view(torch.uint8).numpy()
    return memoryview(of_bytes)
