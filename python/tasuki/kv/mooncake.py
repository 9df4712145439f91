"""One-sided reads by Mooncake's transfer engine, from pool to pool, over TCP.

Owns the engine and what is under way. Runs on the main thread until `register`, on the transfer
thread from then on; peers are connected to by threads of `reaching.py`.

Mooncake is asked for one contiguous row of bytes at a time, because its Python interface tells
the state of one row only. It queues rows for each peer and refuses more than a bound, so that of
a peer's rows some wait here:

    post(runs) ─▶ rows ─▶ waiting ─▶ asked, ROWS_ASKED at most ─▶ ended, in this order ─▶ done()

A peer tells the address and the value of a token, which `connect` reads: an engine of another
process that has the same port by now does not have it.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from tasuki.kv.layout import CacheLayout
from tasuki.kv.mooncake_engine import Engine
from tasuki.kv.net_devices import LOCAL, Network
from tasuki.kv.pool_copies import PoolCopies
from tasuki.kv.reaching import Reaching, start
from tasuki.kv.repack import Repack
from tasuki.kv.staged_reads import StagedPeer, StagedRead, StagingMemory
from tasuki.kv.transfer_plan import Region, Run, TransferPlan
from tasuki.kv.transport import PoolTransport, TransportError, check_required
from tasuki.kv.ways import Way

_MAX_INFLIGHT_BYTES = 16 << 20  # as much as NIXL over TCP
ROWS_ASKED = 512  # of a peer; Mooncake refuses what is above 2,048 (0.3.13)
_TOKEN_BYTES = 16
_GREETING_S = 5.0  # for a peer's token
_POLL_S = 1e-4

_Row = tuple[int, int, int]  # address here, address there, bytes


class MooncakeTransport(PoolTransport["_Peer"]):
    """Reads by Mooncake; see the module.

    Metadata is JSON: where the engine listens, where the token is, and what it is.

    Args:
        network: What transfers may use.

    Raises:
        TransportError: Mooncake is not there, or does not start.
    """

    def __init__(self, network: Network = LOCAL) -> None:
        super().__init__("mooncake")
        self._network = network
        self._engine = Engine(network)
        self._met: dict[str, bytes] = {}  # tokens, by session
        # Reads of tokens under way, by session and token: an engine's own limits are minutes.
        self._greetings: dict[tuple[str, bytes], Future[bytes]] = {}
        self._lock = threading.Lock()  # of these
        self._reaching = Reaching(self._reach, lambda _: None)

    @property
    def max_inflight_bytes(self) -> int:
        """Bytes that may be under way from one peer at a time."""
        return _MAX_INFLIGHT_BYTES

    def register(self, pool: torch.Tensor, layout: CacheLayout) -> None:
        """Register `pool`, once; it stays mapped for the life of the process.

        Raises:
            TransportError: It is not in host memory, or Mooncake refuses it.
        """
        self._require_host_memory(pool.device)
        self.layout = layout.to_wire(pool, transport=self.name)
        self._engine.register(self.layout.pool.base_address, layout.pool_bytes, pool)
        token = secrets.token_bytes(_TOKEN_BYTES)
        own = torch.frombuffer(bytearray(token), dtype=torch.uint8)
        self._open(own)
        told = {"session": self._engine.session, "at": own.data_ptr(), "token": token.hex()}
        self.metadata = json.dumps(told).encode()
        self._staging = StagingMemory(self._open, pool)
        self._copies = PoolCopies(pool)  # of the transfer thread
        self.pool = pool

    def reached(self, peer: str, metadata: bytes, plan: TransferPlan) -> bool:
        """Whether the peer's token was read, or cannot be."""
        return self._reaching.done(peer, metadata)

    def connect(self, peer: str, metadata: bytes, plan: TransferPlan) -> Way | None:
        """Read a peer's token; its metadata's digest is checked by now.

        Returns:
            TCP to its address.

        Raises:
            TransportError: It cannot be reached, is another process by now, or TCP is not allowed.
        """
        session, _, _ = _told(peer, metadata)
        way = Way("tcp", (f"tcp/{session.rpartition(':')[0]}",))
        check_required(way, self._network.require, peer)
        known = self._reaching.take(peer, metadata)
        known.begin = self._slices_of(known, plan) if plan.alike else self._staged(known, plan)
        self._peers[peer] = known
        return way

    def _reach(self, peer: str, metadata: bytes) -> _Peer:
        session, at, token = _told(peer, metadata)
        with self._lock:
            if self._met.get(session, token) != token:
                # The engine keeps what it once learned of a session. A new one knows nothing.
                self._engine, self._met = Engine(self._network), {}
            self._met[session] = token
            known = _Peer(self._engine, session)
        if (found := self._greeted(known, at, token)) != token:
            raise TransportError(
                f"{peer} at {session} is another process by now (its token is {found.hex()})"
            )
        return known

    def _greeted(self, known: _Peer, at: int, token: bytes) -> bytes:
        """What a peer has at `at`; a thread of its own reads it, one for all that ask.

        Raises:
            TransportError: It cannot be read, or not in time: the thread goes on then.
        """
        key = known.session, token
        with self._lock:
            if (greeting := self._greetings.get(key)) is None:
                greeting = Future()
                run = threading.Thread(
                    target=self._greet,
                    args=(known, at, key, greeting),
                    name="kv-greeting",
                    daemon=True,
                )
                start(run, known.session)
                self._greetings[key] = greeting
        try:
            return greeting.result(_GREETING_S)
        except TimeoutError:
            raise TransportError(
                f"{known.session} does not answer within {_GREETING_S:g} s"
            ) from None

    def _greet(
        self, known: _Peer, at: int, key: tuple[str, bytes], greeting: Future[bytes]
    ) -> None:
        found, failed = b"", None
        try:
            found = known.token(at)
        except Exception as error:
            failed = error
        with self._lock:
            del self._greetings[key]
        if failed is None:
            greeting.set_result(found)
        else:
            greeting.set_exception(failed)

    def disconnect(self, peer: str) -> None:
        """Forget a peer; nothing is under way from it."""
        self._reaching.forget(peer)
        known = self._peers.pop(peer, None)
        if known is not None and known.staging is not None:
            self._staging.give_back(known.staging)

    def post(self, peer: str, runs: Sequence[Run]) -> MooncakeRead | StagedRead:
        """Begin to read.

        Raises:
            TransportError: The peer is not there.
        """
        return self._connected(peer).begin(runs)

    def _open(self, memory: torch.Tensor) -> None:
        self._engine.register(memory.data_ptr(), memory.numel(), memory)

    def _slices_of(self, peer: _Peer, plan: TransferPlan) -> _Begin:
        ours, theirs, size = plan.local, plan.remote, plan.slice_bytes

        def begin(runs: Sequence[Run]) -> MooncakeRead:
            return peer.read(
                (_slice(ours, run.local), _slice(theirs, run.remote), run.count * size)
                for run in runs
            )

        return begin

    def _staged(self, peer: _Peer, plan: TransferPlan) -> _Begin:
        memory = peer.staging = self._staging.take(plan)
        ours = self._staging.region(memory, plan)

        def read_slices(slots: Sequence[int], blocks: Sequence[int]) -> MooncakeRead:
            return peer.read(
                (_slice(ours, slot), _slice(plan.remote, block), plan.slice_bytes)
                for slot, block in zip(slots, blocks, strict=True)
            )

        repack = Repack.of(plan, self._copies.slot_bytes)
        free = list(range(plan.staged_slices))
        return StagedPeer(self._copies, repack, memory, read_slices, free).read


_Begin = Callable[[Sequence[Run]], "MooncakeRead | StagedRead"]


@dataclass(slots=True)
class _Peer:
    """A peer's rows: those that wait, and those that Mooncake was asked for, oldest first.

    `begin` begins to read a piece; `staging` is its memory where blocks have another size.
    """

    engine: Engine
    session: str
    begin: _Begin = field(init=False)
    staging: torch.Tensor | None = None
    waiting: deque[tuple[MooncakeRead, _Row]] = field(default_factory=deque)
    asked: deque[tuple[MooncakeRead, int]] = field(default_factory=deque)

    def token(self, at: int) -> bytes:
        """What the peer's memory has at an address; may block for minutes.

        Raises:
            TransportError: It cannot be read.
        """
        self.engine.reach(self.session)  # where nobody is, a read would end after a second only
        found = torch.zeros(_TOKEN_BYTES, dtype=torch.uint8)
        self.engine.register(found.data_ptr(), _TOKEN_BYTES, found)  # kept: it may be written late
        read = self.read([(found.data_ptr(), at, _TOKEN_BYTES)])
        deadline_s = time.monotonic() + _GREETING_S
        while not read.done() and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
        return bytes(found.numpy())

    def read(self, rows: Iterable[_Row]) -> MooncakeRead:
        """Begin to read rows.

        Raises:
            TransportError: Nothing of them was begun.
        """
        read = MooncakeRead(self)
        rows = list(rows)
        read.left = len(rows)
        self.waiting.extend((read, row) for row in rows)
        self.advance()
        if read.error and not read.left:
            raise TransportError(read.error)
        return read

    def advance(self) -> None:
        """Look at the oldest rows, and ask for others; of a read that failed for no more."""
        while self.asked:
            read, batch = self.asked[0]
            try:
                if not self.engine.ended(batch):
                    break
            except TransportError as error:
                read.error = read.error or str(error)
            read.left -= 1
            self.asked.popleft()
        while self.waiting and len(self.asked) < ROWS_ASKED:
            read, row = self.waiting.popleft()
            try:
                if not read.error:
                    self.asked.append((read, self.engine.read(self.session, *row)))
                    continue
            except TransportError as error:
                read.error = str(error)
            read.left -= 1


class MooncakeRead:
    """A read under way; made by `_Peer.read`."""

    def __init__(self, peer: _Peer) -> None:
        self._peer = peer
        self.left = 0  # rows that have not ended
        self.error = ""

    def done(self) -> bool:
        """Whether all bytes arrived.

        Raises:
            TransportError: It failed, and writes to our blocks no more.
        """
        if self.left:
            self._peer.advance()
        if self.left:
            return False
        if self.error:
            raise TransportError(self.error)
        return True


def _told(peer: str, metadata: bytes) -> tuple[str, int, bytes]:
    """Where a peer's engine listens, where its token is, and what it is.

    Raises:
        TransportError: The metadata does not say so.
    """
    try:
        told = json.loads(metadata)
        session, at, token = str(told["session"]), int(told["at"]), bytes.fromhex(told["token"])
        if not 0 <= at < 1 << 64:
            raise ValueError(f"address {at}")
        return session, at, token
    except (ValueError, KeyError, TypeError) as error:
        raise TransportError(f"{peer} tells of no Mooncake engine ({error})") from error


def _slice(region: Region, index: int) -> int:
    """The address of a block's slice."""
    return region.address + index * region.stride_bytes
