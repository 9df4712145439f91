"""Transport for GPUs that cannot read one another: through pinned memory of the host.

NIXL reads host memory only. A reader asks the source to copy a part of its pool to one of the
slots that are the reader's there, reads that slot into one of its own, and copies it to its
pool (staging.py). The requests are NIXL's notifications:

    reader  ── hello: how to reach me ──▶ source          source ── welcome: your set ──▶ reader
    reader  ── stage: id, lane, bytes ──▶ source          source ── staged: id ─────────▶ reader
    reader  ══ read of the slot ════════▶ source

The reader alone decides when a slot of its set is used again: after its read of it ended. So no
part is overwritten before it is read.

Two threads: the transfer thread (`puller.py`) posts and polls transfers; `kv-staging` hears
notifications and copies parts for readers. They share the replies, by id.
"""

from __future__ import annotations

import json
import logging
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tasuki.kv.layout import CacheLayout
from tasuki.kv.nixl import KEPT, describe, open_agent
from tasuki.kv.staging import (
    LANES,
    MAX_PEERS,
    SLOT_BYTES,
    PoolCopies,
    Segment,
    Slots,
    parts_of,
    slot_offset,
)
from tasuki.kv.transfer_plan import Run, TransferPlan
from tasuki.kv.transport import TransportError
from tasuki.v1 import kv_pb2

log = logging.getLogger(__name__)

_HEADER = struct.Struct("<Q")  # address of the slots, before the agent's metadata
_REPLY_S = 10.0  # for a source to welcome, or to stage a part
_POLL_S = 50e-6  # between looks of the staging thread while parts are under way
_IDLE_POLL_S = 1e-3


class HostStagedTransport:
    """Reads through host memory; see the module.

    Args:
        host: Address that this worker binds; its network device is used, no other.
        backend: NIXL plugin that reads the slots.

    Raises:
        TransportError: NIXL or the backend is not there.
    """

    def __init__(self, host: str = "127.0.0.1", backend: str = "UCX") -> None:
        self._backend = backend
        self._agent = open_agent(host, backend)
        self._layout = kv_pb2.Layout()
        self._metadata = b""
        self._peers: dict[str, _Peer] = {}  # transfer thread only
        self._own_sets = list(range(MAX_PEERS, 2 * MAX_PEERS))
        self._next_id = 0
        self._replies: dict[str, str] = {}  # of the staging thread, by what was asked
        self._stopping = threading.Event()

    @property
    def name(self) -> str:
        """As in the registry."""
        return "host-staged"

    @property
    def max_inflight_bytes(self) -> int:
        """Bytes that may be under way from one peer at a time."""
        return LANES * SLOT_BYTES

    @property
    def layout(self) -> kv_pb2.Layout:
        """What a peer must know of the registered pool."""
        return self._layout

    @property
    def metadata(self) -> bytes:
        """Where the slots are, then the agent's name, connection and memory."""
        return self._metadata

    def register(self, pool: torch.Tensor, layout: CacheLayout) -> None:
        """Register slots for `pool`, once, and begin to serve readers.

        Raises:
            TransportError: NIXL refuses the memory.
        """
        self._layout = layout.to_wire(pool, transport=f"host-staged/{self._backend}")
        self._slots = Slots(pinned=pool.is_cuda)
        KEPT.append((self._agent, pool, self._slots))
        region = (self._slots.memory.data_ptr(), self._slots.memory.numel(), 0, "")
        try:
            self._agent.register_memory([region], "DRAM", backends=[self._backend])
            own = self._agent.get_agent_metadata()
        except Exception as error:
            raise TransportError(
                f"NIXL cannot register {region[1]} bytes of host memory: {describe(error)}"
            ) from error
        self._metadata = _HEADER.pack(region[0]) + own
        self._copies = PoolCopies(pool)  # of the transfer thread
        server = _Server(self._agent, PoolCopies(pool), self._slots, self._replies, pool.device)
        threading.Thread(
            target=server.run, args=(self._stopping,), name="kv-staging", daemon=True
        ).start()

    def connect(self, peer: str, metadata: bytes, plan: TransferPlan) -> None:
        """Make ourselves known to `peer`, which gives us a set of its slots.

        Raises:
            TransportError: It cannot be reached, or has no set left.
        """
        if not self._own_sets:
            raise TransportError(f"{MAX_PEERS} workers are being read through host memory: no more")
        (address,) = _HEADER.unpack_from(metadata)
        agent_name: Any = None
        try:
            agent_name = self._agent.add_remote_agent(metadata[_HEADER.size :])
            self._agent.make_connection(agent_name, backends=[self._backend])
            own = self._agent.get_agent_metadata().hex()
            reply = self._ask(agent_name, {"ask": "hello", "metadata": own})
        except Exception as error:
            if agent_name is not None:
                self._remove(agent_name)
            if isinstance(error, TransportError):
                raise
            raise TransportError(f"NIXL cannot connect to {peer}: {describe(error)}") from error
        self._peers[peer] = _Peer(agent_name, plan, address, int(reply), self._own_sets.pop())

    def disconnect(self, peer: str) -> None:
        """Forget `peer`; nothing is under way from it."""
        known = self._peers.pop(peer, None)
        if known is not None:
            self._own_sets.append(known.own_set)
            try:
                self._send(known.agent_name, {"ask": "bye"})
            except Exception as error:  # it may be gone already
                log.debug("leaving %s: %s", peer, describe(error))
            self._remove(known.agent_name)

    def post(self, peer: str, runs: Sequence[Run]) -> StagedTransfer:
        """Begin to read.

        Raises:
            TransportError: The peer is not there.
        """
        known = self._peers.get(peer)
        if known is None:
            raise TransportError(f"{peer} is not connected")
        transfer = StagedTransfer(self, known)
        for segments in parts_of(runs, known.plan):
            transfer.left += 1
            known.waiting.append(_Part(transfer, segments))
        self.advance(known)
        return transfer

    def close(self) -> None:
        """Stop serving readers; registration and agent end with the process."""
        self._stopping.set()

    def advance(self, peer: _Peer) -> None:
        """Let every part under way from `peer` take its next step, and begin others."""
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

    def _request(self, peer: _Peer, lane: int, part: _Part) -> None:
        self._next_id += 1
        part.asked = str(self._next_id)
        part.deadline_s = time.monotonic() + _REPLY_S
        stretches = [(segment.remote, segment.size_bytes) for segment in part.segments]
        message = {"ask": "stage", "id": part.asked, "lane": lane, "bytes": stretches}
        self._send(peer.agent_name, message)

    def _step(self, peer: _Peer, lane: int, part: _Part) -> bool:
        """Staged there? Read here? Copied? Whether all of it is over."""
        if part.handle is None and part.copied is None:
            reply = self._replies.pop(part.asked, None)
            if reply is None:
                if time.monotonic() > part.deadline_s:
                    raise TransportError(f"no part was staged within {_REPLY_S:g} s")
                return False
            if reply:
                raise TransportError(reply)
            part.handle = self._read(peer, lane, part.size_bytes)
            part.state = self._agent.transfer(part.handle)
        if part.handle is not None:
            if part.state == "PROC":
                part.state = self._agent.check_xfer_state(part.handle)
            if part.state == "PROC":
                return False
            handle, part.handle = part.handle, None
            handle.release()
            if part.state != "DONE":
                raise TransportError(f"NIXL read ended as {part.state}")
            slot = self._slots.slot(peer.own_set, lane)
            stretches = [(segment.local, segment.size_bytes) for segment in part.segments]
            part.copied = self._copies.start(slot, stretches, to_pool=True)
        assert part.copied is not None
        return part.copied()

    def _read(self, peer: _Peer, lane: int, size_bytes: int) -> Any:
        there = peer.address + slot_offset(peer.set_there, lane)
        here = self._slots.slot(peer.own_set, lane).data_ptr()
        lists = [
            self._agent.get_xfer_descs([(address, size_bytes, 0)], "DRAM")
            for address in (here, there)
        ]
        return self._agent.initialize_xfer(
            "READ", *lists, peer.agent_name, backends=[self._backend]
        )

    def _ask(self, agent_name: Any, message: dict[str, object]) -> str:
        self._next_id += 1
        asked = str(self._next_id)
        self._send(agent_name, {**message, "id": asked})
        deadline_s = time.monotonic() + _REPLY_S
        while asked not in self._replies:
            if time.monotonic() > deadline_s:
                raise TransportError(f"the peer did not answer within {_REPLY_S:g} s")
            time.sleep(_IDLE_POLL_S)
        reply = self._replies.pop(asked)
        if not reply.isdecimal():
            raise TransportError(reply)
        return reply

    def _send(self, agent_name: Any, message: dict[str, object]) -> None:
        self._agent.send_notif(agent_name, json.dumps(message).encode())

    def _remove(self, agent_name: Any) -> None:
        try:
            self._agent.remove_remote_agent(agent_name)
        except Exception as error:  # it may be gone already
            log.debug("removing %r: %s", agent_name, describe(error))


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
    """What fills one slot; asked for, then read (`handle`), then copied to the pool."""

    transfer: StagedTransfer
    segments: list[Segment]
    asked: str = ""
    deadline_s: float = 0.0
    handle: Any = None
    state: str = ""
    copied: Callable[[], bool] | None = None

    @property
    def size_bytes(self) -> int:
        return sum(segment.size_bytes for segment in self.segments)


@dataclass(slots=True)
class _Peer:
    """A source: `address` of its slots, our set there, the set here, parts by lane."""

    agent_name: Any
    plan: TransferPlan
    address: int
    set_there: int
    own_set: int
    lanes: dict[int, _Part] = field(default_factory=dict)
    waiting: deque[_Part] = field(default_factory=deque)


class _Server:
    """Hears notifications, and copies parts of our pool to the slots of readers."""

    def __init__(
        self,
        agent: Any,
        copies: PoolCopies,
        slots: Slots,
        replies: dict[str, str],
        device: torch.device,
    ) -> None:
        self._agent = agent
        self._copies, self._slots, self._replies = copies, slots, replies
        self._device = device
        self._sets: dict[str, int] = {}  # by the agent of the reader
        self._under_way: deque[tuple[str, str, Callable[[], bool]]] = deque()

    def run(self, stopping: threading.Event) -> None:
        """Serve until told to stop."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        busy_s = 0.0
        while not stopping.is_set():
            heard = False
            for agent, messages in self._agent.get_new_notifs().items():
                for message in messages:
                    heard = True
                    self._hear(agent, json.loads(message))
            if self._report() or heard:
                busy_s = time.monotonic()
            idle = not self._under_way and time.monotonic() - busy_s > 0.05
            stopping.wait(_IDLE_POLL_S if idle else _POLL_S)

    def _hear(self, agent: str, message: dict[str, Any]) -> None:
        if "reply" in message:
            self._replies[message["id"]] = message["reply"]
        elif message["ask"] == "bye":
            if self._sets.pop(agent, None) is not None:
                self._agent.remove_remote_agent(agent)
        elif message["ask"] == "hello":
            try:
                if agent not in self._sets:
                    self._agent.add_remote_agent(bytes.fromhex(message["metadata"]))
                self._reply(agent, message["id"], self._welcome(agent))
            except Exception as error:
                log.warning("reader %s cannot be answered: %s", agent, describe(error))
        else:
            self._stage(agent, message)

    def _welcome(self, agent: str) -> str:
        if agent not in self._sets:
            free = set(range(MAX_PEERS)) - set(self._sets.values())
            if not free:
                return f"{MAX_PEERS} workers read this one through host memory: no more"
            self._sets[agent] = min(free)
        return str(self._sets[agent])

    def _stage(self, agent: str, message: dict[str, Any]) -> None:
        own_set, lane, stretches = self._sets.get(agent), message["lane"], message["bytes"]
        if own_set is None or not 0 <= lane < LANES:
            self._reply(agent, message["id"], f"lane {lane} is not yours: connect anew")
        elif sum(size for _, size in stretches) > SLOT_BYTES or not all(
            self._copies.holds(*stretch) for stretch in stretches
        ):
            self._reply(agent, message["id"], "bytes outside of the pool, or more than a slot")
        else:
            slot = self._slots.slot(own_set, lane)
            ended = self._copies.start(slot, stretches, to_pool=False)
            self._under_way.append((agent, message["id"], ended))

    def _report(self) -> bool:
        """Tell readers of the parts that are staged, in order; whether there were any."""
        told = False
        while self._under_way and self._under_way[0][2]():
            agent, asked, _ = self._under_way.popleft()
            self._reply(agent, asked, "")
            told = True
        return told

    def _reply(self, agent: str, asked: str, reply: str) -> None:
        try:
            self._agent.send_notif(agent, json.dumps({"id": asked, "reply": reply}).encode())
        except Exception as error:  # the reader is gone
            log.debug("answering %s: %s", agent, describe(error))
