"""The reader's side of transfers through pinned host memory, where GPUs cannot read one another.

NIXL reads host memory only. A reader asks the source to copy a part of its pool to one of the
slots that are the reader's there, reads that slot into one of its own, and copies it to its
pool (staging.py). The requests are NIXL's notifications:

    reader  ── hello: how to reach me ──▶ source          source ── welcome: your set ──▶ reader
    reader  ── stage: id, lane, bytes ──▶ source          source ── staged: id ─────────▶ reader
    reader  ══ read of the slot ════════▶ source

The reader alone decides when a slot of its set is used again: after its read of it ended. So no
part is overwritten before it is read.

Two threads, each with an agent of its own: the transfer thread (`puller.py`) posts and polls
transfers here; `kv-staging` (`staging_server.py`) copies parts for readers. Workers that read one
another would else have one agent of the peer for both, and lose both with either.
"""

from __future__ import annotations

import logging
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from tasuki.kv.layout import CacheLayout
from tasuki.kv.net_devices import LOCAL, Network
from tasuki.kv.nixl_agent import Agent, NixlRead, Piece, RemoteAgent, describe
from tasuki.kv.pool_copies import PoolCopies, Rows
from tasuki.kv.reaching import Joining, Steps
from tasuki.kv.repack import Repack
from tasuki.kv.staging import (
    LANES,
    MAX_PEERS,
    SLOT_BYTES,
    Slots,
    parts_of,
    parts_of_planes,
    slot_offset,
)
from tasuki.kv.staging_server import IDLE_S, StagingServer
from tasuki.kv.transfer_plan import Run, TransferPlan
from tasuki.kv.transport import PoolTransport, TransportError
from tasuki.kv.ways import Way

log = logging.getLogger(__name__)

_HEADER = struct.Struct("<Q")  # address of the slots, before the agent's metadata
_REPLY_S = 10.0  # for a source to welcome, or to stage a part
_PROBE_BYTES = 4096  # what is read of a peer to see how its slots are read


class HostStagedTransport(PoolTransport["_Peer"]):
    """Reads through host memory; see the module.

    Metadata is where the slots are, then the agent's name, connection and memory.

    Args:
        network: What transfers may use.
        backend: NIXL plugin that reads the slots.

    Raises:
        TransportError: NIXL or the backend is not there.
    """

    def __init__(self, network: Network = LOCAL, backend: str = "UCX") -> None:
        super().__init__("host-staged")
        self._agent, self._source = (Agent(network, backend) for _ in range(2))
        self._own_sets = list(range(MAX_PEERS, 2 * MAX_PEERS))
        self._next_id = 0
        self._replies: dict[str, str] = {}  # by what was asked
        self._stopping = threading.Event()
        self._joining = Joining(self._join, self._leave)

    @property
    def max_inflight_bytes(self) -> int:
        """Bytes that may be under way from one peer at a time."""
        return LANES * SLOT_BYTES

    def register(self, pool: torch.Tensor, layout: CacheLayout) -> None:
        """Register slots for `pool`, once, and begin to serve readers.

        Raises:
            TransportError: NIXL refuses the memory.
        """
        self.layout = layout.to_wire(pool, transport=f"host-staged/{self._agent.backend}")
        self._slots = Slots(pinned=pool.is_cuda)
        address, size_bytes = self._slots.memory.data_ptr(), self._slots.memory.numel()
        for agent in (self._agent, self._source):
            agent.register((address, size_bytes, 0), "DRAM", (pool, self._slots))
        self._scratch = torch.empty(_PROBE_BYTES, dtype=torch.uint8)
        self._agent.register((self._scratch.data_ptr(), _PROBE_BYTES, 0), "DRAM", self._scratch)
        self.metadata = _HEADER.pack(address) + self._source.metadata
        self.pool = pool
        self._copies = PoolCopies(pool)  # of the transfer thread
        server = StagingServer(self._source, pool, self._slots)
        threading.Thread(
            target=server.run, args=(self._stopping,), name="kv-staging", daemon=True
        ).start()

    def reached(self, peer: str, metadata: bytes, plan: TransferPlan) -> bool:
        """Whether the peer gave us a set of its slots, and a few bytes were read.

        Raises:
            TransportError: It cannot be reached, or has no set left.
        """
        return self._joining.done(peer, metadata, plan)

    def connect(self, peer: str, metadata: bytes, plan: TransferPlan) -> Way | None:
        """Make ourselves known to `peer`, which gives us a set of its slots.

        Returns:
            How its slots are read, where that is known.

        Raises:
            TransportError: It cannot be reached, or has no set left.
        """
        known = self._peers[peer] = self._joining.take(peer, metadata, plan)
        return known.way

    def _join(self, peer: str, metadata: bytes, plan: TransferPlan) -> Steps[_Peer]:
        if not self._own_sets:
            raise TransportError(f"{MAX_PEERS} workers are being read through host memory: no more")
        own_set = self._own_sets.pop()
        try:
            if len(metadata) < _HEADER.size:
                raise TransportError(f"{peer} tells of no slots in host memory")
            (address,) = _HEADER.unpack_from(metadata)
            of_agent = metadata[_HEADER.size :]
            with self._agent.connecting(peer, of_agent) as remote:
                set_there = yield from self._greet(remote)
                here = Piece(self._scratch.data_ptr(), _PROBE_BYTES)
                there = Piece(address + slot_offset(set_there, 0), _PROBE_BYTES)
                way = yield from self._agent.check_way(peer, of_agent, remote, here, there)
                return _Peer(remote, plan, address, set_there, own_set, way)
        except BaseException:
            self._own_sets.append(own_set)
            raise

    def disconnect(self, peer: str) -> None:
        """Forget `peer`; nothing is under way from it."""
        self._joining.forget(peer)
        known = self._peers.pop(peer, None)
        if known is not None:
            self._leave(known)

    def _leave(self, known: _Peer) -> None:
        self._own_sets.append(known.own_set)
        try:
            self._agent.send(known.agent, {"ask": "bye"})
        except Exception as error:  # it may be gone already
            log.debug("leaving %s: %s", known.agent, describe(error))
        self._agent.forget(known.agent)

    def post(self, peer: str, runs: Sequence[Run]) -> StagedTransfer:
        """Begin to read.

        Raises:
            TransportError: The peer is not there.
        """
        known = self._connected(peer)
        transfer = StagedTransfer(self, known)
        parts = list(self._parts(runs, known.plan, transfer))
        transfer.left = len(parts)
        # Idle for so long, our set there may be another reader's by now.
        if not known.lanes and time.monotonic() - known.used_s >= IDLE_S / 2:
            known.greeting = known.greeting or self._greet(known.agent)
        known.waiting.extend(parts)
        self.advance(known)
        return transfer

    def _parts(
        self, runs: Sequence[Run], plan: TransferPlan, transfer: StagedTransfer
    ) -> Iterator[_Part]:
        if plan.alike:
            for segments in parts_of(runs, plan):
                local = [(segment.local, segment.size_bytes) for segment in segments]
                remote = [(segment.remote, segment.size_bytes) for segment in segments]
                yield _Part(transfer, remote, local)
        else:
            repack = Repack.of(plan, self._copies.slot_bytes)
            for part in parts_of_planes(runs, repack):
                yield _Part(transfer, part.stretches, rows=part.rows)

    def close(self) -> None:
        """Leave all peers, and stop serving readers; the agent ends with the process."""
        for peer in list(self._peers):
            self.disconnect(peer)
        self._stopping.set()

    def advance(self, peer: _Peer) -> None:
        """Let every part under way from `peer` take its next step, and begin others."""
        self._hear()
        for lane, part in list(peer.lanes.items()):
            try:
                ended = self._step(peer, lane, part)
            except Exception as error:
                part.transfer.error = part.transfer.error or describe(error)
                ended = True
            if ended:
                part.transfer.left -= 1
                del peer.lanes[lane]
        while peer.waiting and len(peer.lanes) < LANES:
            if not self._greeted(peer):
                return
            part = peer.waiting.popleft()
            if part.transfer.error:
                part.transfer.left -= 1
                continue
            lane = next(lane for lane in range(LANES) if lane not in peer.lanes)
            peer.lanes[lane] = part
            try:
                self._request(peer, lane, part)
            except Exception as error:
                part.transfer.error = describe(error)
                part.transfer.left -= 1
                del peer.lanes[lane]

    def _greeted(self, peer: _Peer) -> bool:
        """Whether we know our set there; if we cannot get one, what waits has failed."""
        if peer.greeting is None:
            return True
        try:
            next(peer.greeting)
            return False
        except StopIteration as ended:
            peer.set_there = ended.value
        except Exception as error:
            for part in peer.waiting:
                part.transfer.error = part.transfer.error or describe(error)
        peer.greeting = None
        return True

    def _request(self, peer: _Peer, lane: int, part: _Part) -> None:
        self._next_id += 1
        part.asked = str(self._next_id)
        peer.used_s = time.monotonic()
        part.deadline_s = peer.used_s + _REPLY_S
        message = {"ask": "stage", "id": part.asked, "lane": lane, "bytes": part.remote}
        self._agent.send(peer.agent, message)

    def _hear(self) -> None:
        """Take what sources have answered."""
        for _, message in self._agent.messages():
            self._replies[message["id"]] = message["reply"]

    def _step(self, peer: _Peer, lane: int, part: _Part) -> bool:
        """Staged there? Read here? Copied? Whether all of it is over."""
        if part.read is None and part.copied is None:
            reply = self._replies.pop(part.asked, None)
            if reply is None:
                if time.monotonic() > part.deadline_s:
                    raise TransportError(f"no part was staged within {_REPLY_S:g} s")
                return False
            if reply:
                raise TransportError(reply)
            here = self._slots.slot(peer.own_set, lane).data_ptr()
            there = peer.address + slot_offset(peer.set_there, lane)
            part.read = self._agent.read(peer.agent, here, there, part.size_bytes)
        if part.read is not None:
            if not part.read.done():
                return False
            part.read = None
            slot = self._slots.slot(peer.own_set, lane)
            if part.rows:
                part.copied = self._copies.spread(slot, part.rows)
            else:
                part.copied = self._copies.start(slot, part.local, to_pool=True)
        assert part.copied is not None
        return part.copied()

    def _greet(self, remote: RemoteAgent) -> Steps[int]:
        """Ask a source for a set of its slots; yields until it answers. Returns the set."""
        self._next_id += 1
        asked = str(self._next_id)
        hello = {"ask": "hello", "id": asked, "metadata": self._agent.metadata.hex()}
        self._agent.send(remote, hello)
        deadline_s = time.monotonic() + _REPLY_S
        while asked not in self._replies:
            if time.monotonic() > deadline_s:
                raise TransportError(f"the peer did not answer within {_REPLY_S:g} s")
            yield
            self._hear()
        reply = self._replies.pop(asked)
        if not reply.isdecimal():
            raise TransportError(reply)
        return int(reply)


class StagedTransfer:
    """Reads under way; made by `HostStagedTransport.post`."""

    def __init__(self, transport: HostStagedTransport, peer: _Peer) -> None:
        self._transport, self._peer = transport, peer
        self.left = 0  # parts that have not ended
        self.error = ""

    def done(self) -> bool:
        """Whether all bytes arrived.

        Raises:
            TransportError: It failed, and writes to our blocks no more.
        """
        self._transport.advance(self._peer)
        if self.left:
            return False
        if self.error:
            raise TransportError(f"read through host memory: {self.error}")
        return True


@dataclass(slots=True)
class _Part:
    """What fills one slot; asked for, then read, then copied to the pool.

    `remote` are (address, bytes) there, `local` here; of blocks of another size it is `rows`.
    """

    transfer: StagedTransfer
    remote: list[tuple[int, int]]
    local: list[tuple[int, int]] = field(default_factory=list)
    rows: list[Rows] = field(default_factory=list)
    asked: str = ""
    deadline_s: float = 0.0
    read: NixlRead | None = None
    copied: Callable[[], bool] | None = None

    @property
    def size_bytes(self) -> int:
        return sum(size for _, size in self.remote)


@dataclass(slots=True)
class _Peer:
    """A source: `address` of its slots, our set there, the set here, its way, parts by lane.

    `used_s` is when we last asked it for anything; while `greeting` we ask for a set there.
    """

    agent: RemoteAgent
    plan: TransferPlan
    address: int
    set_there: int
    own_set: int
    way: Way | None
    lanes: dict[int, _Part] = field(default_factory=dict)
    waiting: deque[_Part] = field(default_factory=deque)
    used_s: float = field(default_factory=time.monotonic)
    greeting: Steps[int] | None = None
