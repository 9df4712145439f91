"""The decode worker's side of every handoff, as a state machine.

Time, messages and ends of pulls go in; `ToPrefill`, `Pull`, `CancelPull` and
`Redial` effects come out, and the engine is told through `KvHost`. No I/O, no
clock, no threads: the engine thread calls it (see `handoff.py`), and so does
the test that tries every order of events.

    submit ─▶ waiting ─credit─▶ wanted ─scheduled─▶ assigned ─all pulled, valid─▶ decoding
                                  │                   │
                                  └── no room: REFUSED└── lost: KV_LOST

The fence. `acked_s` is when we sent the last want or renewal that the prefill
worker answered: a renewal with "alive", either with an announcement that says
it was heard. It keeps every announced block from then for a whole lease, so a
pull seen complete at T is valid iff

    T <= acked_s + lease_s - margin_s

An announcement answers the want that it follows, so nothing is asked where all
goes well. A renewal sent after T and acknowledged proves it too, by the same
line. A pull that is complete but not proven is asked about (a renewal now) for
a bounded time; no answer, and the KV is lost.

Blocks that a pull may still write to are handed to the engine as quarantined,
and freed one order at a time as the pulls end.

Long because it is one machine: its safety is argued, and tested, as a whole.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from tasuki.engine.api import Assignment, KvHost, LegEndReason, LegTimings
from tasuki.errors import TasukiError
from tasuki.kv.config import HandoffConfig, HandoffCounters
from tasuki.kv.effects import CancelPull, Effect, Pull, PullDone, Redial, ToPrefill
from tasuki.kv.wire import first_tokens_from_wire
from tasuki.v1 import kv_pb2 as pb

_NEVER_S = float("-inf")


@dataclass(slots=True, eq=False)
class _Handoff:
    """One DECODE leg until it decodes.

    Attributes:
        greeted: the handshake with the peer is done.
        credited_s: when credit was given and the want sent; None: waits for room.
        scheduled: the prefill worker schedules it (heard, or implied).
        remote: announced blocks heard, contiguously from 0.
        posted: index up to which pulls are ordered.
        orders: pulls that have not ended.
        last_done_s: when the latest pull was seen complete.
        acked_s: send time of the last want or renewal that was answered.
        ask_until_s: complete but not proven: how long an answer is waited for.
    """

    request_id: str
    peer: str
    submitted_s: float
    greeted: bool
    credited_s: float | None = None
    scheduled: bool = False
    remote: list[int] = field(default_factory=list)
    prefilled: pb.Prefilled | None = None
    prefilled_s: float = 0.0
    assignment: Assignment | None = None
    posted: int = 0
    orders: set[int] = field(default_factory=set)
    first_posted_s: float | None = None
    last_done_s: float = _NEVER_S
    acked_s: float = _NEVER_S
    ask_until_s: float | None = None
    timings: LegTimings = field(default_factory=LegTimings)


@dataclass(slots=True)
class _Order:
    """A pull under way; `handoff` no longer cares when it is not live."""

    handoff: _Handoff
    local: list[int]


@dataclass(slots=True)
class _Peer:
    """One prefill engine.

    Attributes:
        asked: when each want and renewal of late was sent, and what it was about.
        releasing: request: (keep, until when it is repeated).
    """

    lease_s: float
    connected: bool = False
    heartbeat_s: float = _NEVER_S
    asked: dict[int, tuple[float, list[_Handoff]]] = field(default_factory=dict)
    releasing: dict[str, tuple[bool, float]] = field(default_factory=dict)


class DecodeSide:
    """All handoffs that this engine is the decode worker of.

    Args:
        host: the engine.
        config: times; the lease of a peer comes with its handshake.
        counters: pulls are counted here.
    """

    def __init__(self, host: KvHost, config: HandoffConfig, counters: HandoffCounters) -> None:
        self._host = host
        self._config = config
        self._counters = counters
        self._handoffs: dict[str, _Handoff] = {}
        self._waiting: deque[_Handoff] = deque()
        self._orders: dict[int, _Order] = {}
        self._next_order = 1
        self._next_seq = 1  # never used twice, whatever becomes of the peer
        self._peers: dict[str, _Peer] = {}
        self._effects: list[Effect] = []

    # What the engine thread reads.

    def drain(self) -> list[Effect]:
        """Take the effects since the last call, in order."""
        effects, self._effects = self._effects, []
        return effects

    def next_deadline(self) -> float | None:
        """When `tick` is due next; None: nothing waits for time to pass."""
        return min(self._deadlines(), default=None)

    def needs(self, peer: str) -> bool:
        """Whether anything is left to say to `peer`."""
        known = self._peers.get(peer)
        return bool(known and known.releasing) or any(
            h.peer == peer for h in self._handoffs.values()
        )

    @property
    def idle(self) -> bool:
        """Whether no handoff, pull or unanswered release is kept."""
        return not (
            self._handoffs or self._orders or any(p.releasing for p in self._peers.values())
        )

    # Events of the router and the engine.

    def submit(self, request_id: str, peer: str, now_s: float) -> None:
        """A DECODE leg was submitted to the engine, which parked it.

        A second one under a live id is dropped, as the engine drops it.
        """
        if request_id in self._handoffs:
            return
        known = self._peers.setdefault(peer, _Peer(self._config.lease_s))
        handoff = _Handoff(request_id, peer, now_s, greeted=known.connected)
        known.releasing.pop(request_id, None)
        self._handoffs[request_id] = handoff
        self._waiting.append(handoff)
        self._credit(now_s)

    def abort(self, request_id: str, now_s: float) -> bool:
        """The router wants no more of it.

        Returns:
            Whether there was such a handoff; one that decodes is the engine's.
        """
        handoff = self._handoffs.get(request_id)
        if handoff is None:
            return False
        self._end(handoff, LegEndReason.ABORTED, "", now_s, keep=True)
        return True

    def on_leg_ended(self, request_id: str, now_s: float) -> None:
        """The engine ended the leg by itself, before it had blocks."""
        handoff = self._handoffs.pop(request_id, None)
        if handoff is not None and handoff.credited_s is not None:
            self._release(handoff, now_s, keep=False)

    # Events of the stream to a prefill engine.

    def on_connected(self, peer: str, lease_s: float, now_s: float) -> None:
        """The handshake with `peer` is done, for the first time or again."""
        known = self._peers.setdefault(peer, _Peer(lease_s))
        known.lease_s = lease_s
        known.connected = True
        for handoff in self._handoffs.values():
            if handoff.peer == peer and not handoff.greeted:
                handoff.greeted = True
                handoff.timings.handshake_s = now_s - handoff.submitted_s
        self._beat(peer, known, now_s)

    def on_disconnected(self, peer: str) -> None:
        """The stream broke; it is being made anew."""
        if known := self._peers.get(peer):
            known.connected = False

    def on_peer_gone(
        self, peer: str, message: str, now_s: float, reason: LegEndReason = LegEndReason.KV_LOST
    ) -> None:
        """`peer` is no more, or will never talk to us: its handoffs end at once."""
        for handoff in [h for h in self._handoffs.values() if h.peer == peer]:
            self._end(handoff, reason, message, now_s, keep=False)
        self._peers.pop(peer, None)

    def on_message(self, peer: str, message: pb.FromPrefill, now_s: float) -> None:
        """A message of a prefill engine, after the handshake."""
        match message.WhichOneof("message"):
            case "scheduled":
                if handoff := self._of(peer, message.scheduled.request_id):
                    self._scheduled(handoff, now_s)
            case "announce":
                if handoff := self._of(peer, message.announce.request_id):
                    self._announce(handoff, message.announce, now_s)
            case "prefilled":
                if handoff := self._of(peer, message.prefilled.request_id):
                    self._prefilled(handoff, message.prefilled, now_s)
            case "renewed":
                self._renewed(peer, message.renewed, now_s)
            case "gone":
                if known := self._peers.get(peer):
                    known.releasing.pop(message.gone.request_id, None)
                if handoff := self._of(peer, message.gone.request_id):
                    self._lost(handoff, f"prefill worker {peer}: {message.gone.reason}", now_s)
            case _:
                pass  # a message of a later version

    # Events of the transfer thread.

    def on_pull_done(self, done: PullDone, now_s: float) -> None:
        """A pull ended: nothing of it writes to our blocks any more."""
        order = self._orders.pop(done.order_id)
        handoff = order.handoff
        self._counters.kv_pulled_bytes += done.moved_bytes
        if done.error:
            self._counters.kv_pull_failures += 1
        else:
            self._counters.kv_pulls += 1
            self._counters.kv_pulled_blocks += len(order.local)
        if self._handoffs.get(handoff.request_id) is not handoff:
            self._host.free_quarantined(order.local)
            return
        handoff.orders.discard(done.order_id)
        if done.error:
            self._lost(handoff, f"pull from {handoff.peer} failed: {done.error}", now_s)
            return
        handoff.last_done_s = max(handoff.last_done_s, done.finished_s)
        timings = handoff.timings
        timings.transfer_bytes += done.moved_bytes
        timings.transfer_blocks += len(order.local)
        if handoff.first_posted_s is None or done.posted_s < handoff.first_posted_s:
            handoff.first_posted_s = done.posted_s
        timings.transfer_s = handoff.last_done_s - handoff.first_posted_s
        self._check(handoff, now_s)

    def tick(self, now_s: float) -> None:
        """Let time pass: credit, heartbeats, silent peers."""
        self._credit(now_s)
        for handoff in list(self._handoffs.values()):
            due_s = self._give_up_s(handoff)
            if due_s is not None and due_s <= now_s:
                silent = f"prefill worker {handoff.peer} has not answered in time"
                self._effects.append(Redial(handoff.peer))
                self._lost(handoff, silent, now_s)
        for peer, known in list(self._peers.items()):
            for request_id, (_, until_s) in list(known.releasing.items()):
                if until_s <= now_s:
                    del known.releasing[request_id]
            if self._beats(peer, known) and self._beat_due_s(known) <= now_s:
                self._beat(peer, known, now_s)
            elif not known.connected and not self.needs(peer):
                del self._peers[peer]

    # Inside: from submit to assigned.

    def _credit(self, now_s: float) -> None:
        """Give credit first come, first served: a large request is not overtaken for ever."""
        while self._waiting:
            handoff = self._waiting[0]
            if self._handoffs.get(handoff.request_id) is handoff:
                if not self._host.may_credit(handoff.request_id):
                    return
                handoff.credited_s = now_s
                self._want(handoff, now_s)
            self._waiting.popleft()

    def _want(self, handoff: _Handoff, now_s: float) -> None:
        known = self._peers[handoff.peer]
        if not known.connected:
            return  # connecting says it
        want = pb.Want(
            request_id=handoff.request_id,
            prefix_blocks=self._host.prefix_hint(handoff.request_id),
            seq=self._ask(known, [handoff], now_s),
        )
        self._say(handoff.peer, pb.FromDecode(want=want))

    def _of(self, peer: str, request_id: str) -> _Handoff | None:
        handoff = self._handoffs.get(request_id)
        return handoff if handoff is not None and handoff.peer == peer else None

    def _scheduled(self, handoff: _Handoff, now_s: float) -> bool:
        """Assign blocks. Returns False when the handoff ended for want of room."""
        if handoff.assignment is not None:
            return True
        if handoff.credited_s is None:
            return False  # of an earlier handoff by this name
        handoff.scheduled = True
        try:
            handoff.assignment = self._host.assign(handoff.request_id)
        except TasukiError:  # the engine ended it, and has yet to tell
            self.on_leg_ended(handoff.request_id, now_s)
            return False
        if handoff.assignment is None:
            refused = LegEndReason.REFUSED
            self._end(handoff, refused, "no room for the request's KV", now_s, keep=True)
            return False
        handoff.posted = handoff.timings.prefix_blocks = handoff.assignment.prefix_blocks
        return True

    def _announce(self, handoff: _Handoff, announce: pb.Announce, now_s: float) -> None:
        if announce.group != 0 or not self._scheduled(handoff, now_s):
            return
        self._answered(handoff, announce.heard)
        known = len(handoff.remote)
        if announce.first > known:  # one before it was lost: have it said again
            self._renew(handoff.peer, [handoff], now_s)
            return
        handoff.remote.extend(announce.blocks[known - announce.first :])
        self._pull(handoff)
        self._check(handoff, now_s)

    def _prefilled(self, handoff: _Handoff, prefilled: pb.Prefilled, now_s: float) -> None:
        if handoff.prefilled is not None or handoff.credited_s is None:
            return
        if all(token.finished for token in prefilled.first_tokens):
            self._end(handoff, LegEndReason.FINISHED, "", now_s, keep=False)
            return
        if not self._scheduled(handoff, now_s):
            return
        handoff.prefilled = prefilled
        handoff.prefilled_s = now_s
        self._check(handoff, now_s)

    # Inside: from assigned to the end.

    def _pull(self, handoff: _Handoff) -> None:
        """Order what is announced, held by nobody here, and has a place."""
        assert handoff.assignment is not None
        local = handoff.assignment.blocks
        end = min(len(handoff.remote), len(local))
        if handoff.posted >= end:
            return
        pairs = list(
            zip(handoff.remote[handoff.posted : end], local[handoff.posted : end], strict=True)
        )
        handoff.posted = end
        order_id = self._next_order
        self._next_order += 1
        self._orders[order_id] = _Order(handoff, [ours for _, ours in pairs])
        handoff.orders.add(order_id)
        self._effects.append(Pull(order_id, handoff.peer, pairs))

    def _deadline_s(self, handoff: _Handoff) -> float:
        """The fence: reads seen complete until then are valid."""
        lease_s = self._peers[handoff.peer].lease_s
        return handoff.acked_s + lease_s * (1.0 - self._config.margin_fraction)

    def _check(self, handoff: _Handoff, now_s: float) -> None:
        """Start decoding if all is here and proven; ask if it is here and not proven."""
        if handoff.prefilled is None or handoff.assignment is None:
            return
        total = len(handoff.assignment.blocks)
        if handoff.prefilled.total_blocks != total:
            said = handoff.prefilled.total_blocks
            self._lost(handoff, f"prefill worker has {said} blocks, {total} are expected", now_s)
            return
        if handoff.posted < total or handoff.orders:
            return
        if handoff.last_done_s > self._deadline_s(handoff):
            if handoff.ask_until_s is None:
                lease_s = self._peers[handoff.peer].lease_s
                handoff.ask_until_s = now_s + self._config.ask_leases * lease_s
                self._renew(handoff.peer, [handoff], now_s)
            return
        handoff.timings.transfer_exposed_s = max(0.0, now_s - handoff.prefilled_s)
        del self._handoffs[handoff.request_id]
        self._release(handoff, now_s, keep=False)
        first_tokens = first_tokens_from_wire(handoff.prefilled)
        self._host.start_decode(handoff.request_id, first_tokens, handoff.timings)

    def _lost(self, handoff: _Handoff, message: str, now_s: float) -> None:
        self._end(handoff, LegEndReason.KV_LOST, message, now_s, keep=False)

    def _end(
        self, handoff: _Handoff, reason: LegEndReason, message: str, now_s: float, *, keep: bool
    ) -> None:
        """End the leg; what pulls may still write to stays quarantined."""
        del self._handoffs[handoff.request_id]
        if handoff.credited_s is not None:
            self._release(handoff, now_s, keep=keep)
        quarantine: list[int] = []
        for order_id in sorted(handoff.orders):
            quarantine += self._orders[order_id].local
            self._effects.append(CancelPull(order_id))
        self._host.end_decode_leg(
            handoff.request_id,
            reason,
            message,
            quarantine=quarantine,
            timings=handoff.timings,
        )

    # Inside: what is said to the peer.

    def _release(self, handoff: _Handoff, now_s: float, *, keep: bool) -> None:
        known = self._peers[handoff.peer]
        known.releasing[handoff.request_id] = (keep, now_s + 2 * known.lease_s)
        release = pb.Release(request_ids=[handoff.request_id], keep=keep)
        self._say(handoff.peer, pb.FromDecode(release=release))

    def _renew(self, peer: str, handoffs: list[_Handoff], now_s: float) -> None:
        known = self._peers[peer]
        if not known.connected:
            return  # connecting again renews all
        renewals = [
            pb.Renewal(
                request_id=h.request_id,
                scheduled=h.scheduled,
                announced_blocks=len(h.remote),
                prefilled=h.prefilled is not None,
            )
            for h in handoffs
        ]
        seq = self._ask(known, handoffs, now_s)
        self._say(peer, pb.FromDecode(renew=pb.Renew(seq=seq, renewals=renewals)))

    def _ask(self, known: _Peer, handoffs: list[_Handoff], now_s: float) -> int:
        """Remember when a question about these is sent, for as long as an answer can help."""
        while known.asked:  # in order of their time
            seq, (sent_s, _) = next(iter(known.asked.items()))
            if sent_s + 2 * known.lease_s > now_s:
                break
            del known.asked[seq]
        seq = self._next_seq
        self._next_seq += 1
        known.asked[seq] = (now_s, handoffs)
        return seq

    def _answered(self, handoff: _Handoff, seq: int) -> None:
        """The lease lasts from when that question arrived, hence from when it was sent."""
        sent_s, asked = self._peers[handoff.peer].asked.get(seq, (_NEVER_S, []))
        if any(one is handoff for one in asked):  # not one of that name before it
            handoff.acked_s = max(handoff.acked_s, sent_s)

    def _renewed(self, peer: str, renewed: pb.Renewed, now_s: float) -> None:
        known = self._peers.get(peer)
        if known is None or renewed.seq not in known.asked:
            return
        _, handoffs = known.asked[renewed.seq]
        alive, gone = set(renewed.alive), set(renewed.gone)
        for handoff in handoffs:
            if self._handoffs.get(handoff.request_id) is not handoff:
                continue  # that one ended
            if handoff.request_id in alive:
                self._answered(handoff, renewed.seq)
                self._check(handoff, now_s)
            elif handoff.request_id in gone:
                self._lost(handoff, f"prefill worker {peer} has let its blocks go", now_s)

    def _beat(self, peer: str, known: _Peer, now_s: float) -> None:
        """Say everything again that may have got lost."""
        known.heartbeat_s = now_s
        if not known.connected:
            return
        live = [h for h in self._handoffs.values() if h.peer == peer and h.credited_s is not None]
        for handoff in live:
            if not handoff.scheduled:
                self._want(handoff, now_s)
        if live:
            self._renew(peer, live, now_s)
        for keep in (False, True):
            ids = [name for name, (kept, _) in known.releasing.items() if kept is keep]
            if ids:
                release = pb.Release(request_ids=ids, keep=keep)
                self._say(peer, pb.FromDecode(release=release))

    def _say(self, peer: str, message: pb.FromDecode) -> None:
        if self._peers[peer].connected:
            self._effects.append(ToPrefill(peer, message))

    # Inside: time.

    def _beats(self, peer: str, known: _Peer) -> bool:
        return known.connected and (
            bool(known.releasing)
            or any(h.peer == peer and h.credited_s is not None for h in self._handoffs.values())
        )

    def _beat_due_s(self, known: _Peer) -> float:
        return known.heartbeat_s + known.lease_s / self._config.heartbeats_per_lease

    def _give_up_s(self, handoff: _Handoff) -> float | None:
        """When silence has lasted too long."""
        if handoff.credited_s is None:
            return None
        if handoff.ask_until_s is not None:
            return handoff.ask_until_s
        lease_s = self._peers[handoff.peer].lease_s
        heard_s = max(handoff.credited_s, handoff.acked_s)
        return heard_s + lease_s * (1.0 + self._config.ask_leases)

    def _deadlines(self) -> Iterator[float]:
        for handoff in self._handoffs.values():
            due_s = self._give_up_s(handoff)
            if due_s is not None:
                yield due_s
        for peer, known in self._peers.items():
            if self._beats(peer, known):
                yield self._beat_due_s(known)
            for _, until_s in known.releasing.values():
                yield until_s
