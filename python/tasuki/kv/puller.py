"""The transfer thread: carries out pull orders and reports how each ended.

The engine thread puts orders in and never waits; this thread alone touches the
transport. Orders of one peer are cut into pieces and posted first come, first
served while the peer's bytes under way stay under the transport's bound. A peer
that does not answer yet is asked again; its orders wait (`reaching.py`). With
nothing under way it sleeps on its condition and costs nothing.

    order ─▶ queue of its peer ─▶ pieces posted ─▶ all ended ─▶ PullDone

An order that failed or was cancelled posts no more pieces, and is reported
only when those already posted have ended: its blocks are written no more.

The thread also computes digests (`digester.py`): of what a piece brought, while the next one
is under way, and of our own blocks for a peer that reads them.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from tasuki.errors import TasukiError
from tasuki.kv.clock import now_s
from tasuki.kv.digest import UnitDigests
from tasuki.kv.digester import DigestJobs
from tasuki.kv.effects import CancelPull, Digest, Digested, Pull, PullDone, PullProgress
from tasuki.kv.pull_orders import Order, Peer, Piece
from tasuki.kv.transfer_plan import TransferPlan
from tasuki.kv.transport import Transport, check_metadata

log = logging.getLogger(__name__)

# Between looks: a share of the time already waited, so that the end of a transfer is
# noticed that much late at most, be it one of microseconds or of seconds.
_POLL_SHARE = 0.125
_POLL_MIN_S = 50e-6
_POLL_MAX_S = 2e-3
# At least, between two reports of an order's progress: a quarter of the least --pull-timeout-s.
_PROGRESS_S = 0.025


@dataclass(frozen=True, slots=True)
class Connect:
    """Make the pool of `peer` readable by `plan` before the orders that follow."""

    peer: str
    metadata: bytes
    digest: bytes
    plan: TransferPlan


@dataclass(frozen=True, slots=True)
class Forget:
    """No more orders will come for `peer`, unless it is connected again."""

    peer: str


PullerCommand = Connect | Forget | Pull | CancelPull | Digest


@dataclass(frozen=True, slots=True)
class PeerFailed:
    """`peer` cannot be read from: its metadata or its transport is unusable."""

    peer: str
    message: str


PullerReport = PullDone | PullProgress | PeerFailed | Digested


class Puller(threading.Thread):
    """The transfer thread.

    Args:
        transport: registered, and this thread's alone from now on.
        report: called from this thread with what happens to orders and peers.
        clock: the handoff's clock.
    """

    def __init__(
        self,
        transport: Transport,
        report: Callable[[PullerReport], None],
        clock: Callable[[], float] = now_s,
    ) -> None:
        super().__init__(name="kv-transfer", daemon=True)
        self._transport = transport
        self._report = report
        self._clock = clock
        self._condition = threading.Condition()
        self._commands: deque[PullerCommand] = deque()
        self._stopping = False
        self._peers: dict[str, Peer] = {}
        self._orders: dict[int, Order] = {}
        self._digests = DigestJobs(transport)

    # Called from other threads.

    def put(self, command: PullerCommand) -> None:
        """Have `command` carried out, after those before it; never waits."""
        with self._condition:
            self._commands.append(command)
            self._condition.notify()

    def stop(self, timeout_s: float = 5.0) -> None:
        """End the thread; what is under way is not waited for."""
        with self._condition:
            self._stopping = True
            self._condition.notify()
        self.join(timeout_s)

    # The thread.

    def run(self) -> None:
        pause_s = _POLL_MIN_S
        moved_s = self._clock()
        moved = False  # if so it looks again at once: what was posted may have ended by now
        while True:
            with self._condition:
                if not (self._commands or self._stopping or self._digests.waiting or moved):
                    busy = self._digests.busy or any(peer.is_busy for peer in self._peers.values())
                    self._condition.wait(pause_s if busy else None)
                if self._stopping:
                    break
                commands, self._commands = self._commands, deque()
            for command in commands:
                self._carry_out(command)
            moved = self._poll()
            for name in list(self._peers):
                moved |= self._post(name)
            moved |= self._digests.begin()
            if moved or commands:
                moved_s = self._clock()
            waited_s = self._clock() - moved_s
            pause_s = min(max(_POLL_MIN_S, waited_s * _POLL_SHARE), _POLL_MAX_S)
        self._transport.close()

    def _carry_out(self, command: PullerCommand) -> None:
        match command:
            case Connect(peer, metadata, digest, plan):
                self._connect(peer, metadata, digest, plan)
            case Forget(peer):
                self._forget(peer)
            case Pull():
                self._enqueue(command)
            case CancelPull(order_id):
                self._cancel(order_id)
            case Digest():
                self._digests.own(command, self._report)

    def _connect(self, name: str, metadata: bytes, digest: bytes, plan: TransferPlan) -> None:
        known = self._peers.get(name)
        if known is not None and known.metadata == metadata and known.plan == plan:
            known.leaving = False
            return
        if known is not None and (known.orders or known.inflight):
            message = f"{name} describes its KV pool anew while {len(known.orders)} pulls wait"
            self._report(PeerFailed(name, f"{message}: a pool must stay as it is"))
            return
        try:
            check_metadata(metadata, digest)
        except TasukiError as error:
            self._report(PeerFailed(name, str(error)))
            return
        self._peers[name] = Peer(metadata, plan)

    def _limit_bytes(self, peer: Peer) -> int:
        """What may be under way from a peer by this thread."""
        return peer.plan.limit_bytes(self._transport.max_inflight_bytes)

    def _join(self, name: str, peer: Peer) -> bool:
        """Connect for the first time. False: not yet, or it failed."""
        try:
            return self._open(name, peer)
        except TasukiError as error:
            del self._peers[name]
            self._transport.disconnect(name)
            self._report(PeerFailed(name, str(error)))
            self._fail_waiting(peer, str(error))
            return False

    def _open(self, name: str, peer: Peer) -> bool:
        """Connect, anew if a transfer failed and nothing is under way. False: not yet."""
        if peer.broken:
            self._transport.disconnect(name)
            peer.connected = peer.broken = False
        if not peer.connected:
            if not self._transport.reached(name, peer.metadata, peer.plan):
                return False
            way = self._transport.connect(name, peer.metadata, peer.plan)
            peer.connected, peer.joining = True, False
            if way is not None and peer.way != way:
                peer.way = way
                log.info("KV from %s travels by %s", name, way)
        return True

    def _forget(self, name: str) -> None:
        peer = self._peers.get(name)
        if peer is None:
            return
        peer.leaving = True
        self._leave(name, peer)

    def _leave(self, name: str, peer: Peer) -> None:
        if peer.leaving and not peer.inflight and not peer.orders:
            del self._peers[name]
            self._transport.disconnect(name)

    def _enqueue(self, pull: Pull) -> None:
        now_s = self._clock()
        order = Order(
            pull.order_id,
            check=frozenset(pull.check),
            posted_s=now_s,
            ended_s=now_s,
            reported_s=now_s,
        )
        peer = self._peers.get(pull.peer)
        if peer is None:
            order.error = f"{pull.peer} is not connected"
            self._finish(order)
            return
        try:
            limit_bytes = self._limit_bytes(peer) // 2
            order.pieces.extend(peer.plan.chunks(pull.pairs, limit_bytes))
        except TasukiError as error:
            order.pieces.clear()
            order.error = str(error)
        self._orders[order.order_id] = order
        if order.pieces:
            peer.orders.append(order)
        else:
            self._finish(order)

    def _cancel(self, order_id: int) -> None:
        order = self._orders.get(order_id)
        if order is not None:
            self._fail(order, "cancelled")

    def _fail(self, order: Order, error: str) -> None:
        order.error = order.error or error
        order.pieces.clear()
        self._settle(order)

    def _fail_waiting(self, peer: Peer, error: str) -> None:
        """No connection can be made: fail the peer's orders, which have nothing under way."""
        for order in peer.orders:
            if order.pieces:  # else it was cancelled
                self._fail(order, error)

    def _settle(self, order: Order) -> None:
        """Report an order if nothing of it is left to do."""
        if not (order.inflight or order.jobs or order.pieces):
            self._finish(order)

    def _finish(self, order: Order) -> None:
        self._orders.pop(order.order_id, None)
        self._report(
            PullDone(
                order_id=order.order_id,
                posted_s=order.posted_s,
                finished_s=order.ended_s,
                moved_bytes=order.moved_bytes,
                descriptors=order.descriptors,
                error=order.error,
                digests=tuple(order.digests),
                post_s=order.post_s,
                reconnects=order.reconnects,
                way=order.way,
            )
        )

    def _poll(self) -> bool:
        """Look at every transfer under way. Returns whether one ended."""
        moved = False
        for name, peer in list(self._peers.items()):
            still: list[Piece] = []
            inflight, peer.inflight = peer.inflight, []
            for piece in inflight:
                error = ""
                try:
                    if not piece.transfer.done():
                        still.append(piece)
                        continue
                    piece.order.moved_bytes += piece.size_bytes
                except TasukiError as failure:
                    error = str(failure)
                    peer.broken = True
                moved = True
                peer.inflight_bytes -= piece.size_bytes
                if piece.order.check and not piece.order.error and not error:
                    piece.order.jobs += 1
                    deliver = functools.partial(self._digested, piece.order)
                    self._digests.arrived(piece.runs, piece.order.check, peer.plan, deliver)
                self._piece_ended(piece.order, error)
            peer.inflight = still
            self._leave(name, peer)
        return self._digests.poll() or moved

    def _piece_ended(self, order: Order, error: str) -> None:
        order.inflight -= 1
        order.ended_s = self._clock()
        if error:
            self._fail(order, error)
        elif order.inflight or order.pieces:
            if not order.error and order.ended_s > order.reported_s + _PROGRESS_S:
                order.reported_s = order.ended_s
                self._report(PullProgress(order.order_id))
        else:
            self._settle(order)

    def _digested(self, order: Order, digests: UnitDigests | None, error: str) -> None:
        """Of a piece that arrived."""
        order.jobs -= 1
        if digests is not None:
            order.digests.append(digests)
        if error:
            self._fail(order, error)
        else:
            self._settle(order)

    def _post(self, name: str) -> bool:
        """Post pieces of `name` while the bound allows. Returns whether any was."""
        peer = self._peers[name]
        if peer.joining and not self._join(name, peer):
            return False
        moved = False
        while peer.orders:
            order = peer.orders[0]
            if not order.pieces:  # posted, failed or cancelled
                peer.orders.popleft()
                continue
            runs = order.pieces[0]
            size_bytes = peer.plan.piece_bytes(runs)
            limit_bytes = self._limit_bytes(peer)
            if peer.inflight and peer.inflight_bytes + size_bytes > limit_bytes:
                break
            if peer.broken and peer.inflight:
                break  # connect anew once those have ended
            order.reconnects += peer.broken
            try:
                if not self._open(name, peer):
                    break
            except TasukiError as error:
                peer.broken = True
                self._fail_waiting(peer, str(error))
                continue
            order.pieces.popleft()
            moved = True
            try:
                if order.descriptors == 0:
                    order.posted_s = self._clock()
                order.descriptors += len(runs)
                order.way = peer.way
                begin_s = self._clock()
                transfer = self._transport.post(name, runs)
                order.post_s += self._clock() - begin_s
            except TasukiError as error:
                peer.broken = True
                self._fail(order, str(error))
                continue
            order.inflight += 1
            peer.inflight_bytes += size_bytes
            peer.inflight.append(Piece(transfer, order, size_bytes, runs))
        self._leave(name, peer)
        return moved
