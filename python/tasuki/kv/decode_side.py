"""The decode worker's side of every handoff, as a state machine.

Time, messages and ends of pulls go in; `ToPrefill`, `Pull`, `CancelPull` and
`Redial` effects come out, and the engine is told through `KvHost`. No I/O, no
clock, no threads: the engine thread calls it (see `handoff.py`; the loop's thread
calls `beat`, and `read_ahead`), and so does the test that tries every order of events.

    submit ─▶ waiting ─credit─▶ wanted ─scheduled─▶ assigned ─all pulled, valid─▶ decoding
                                  │                   │
                                  └── no room: REFUSED└── lost: KV_LOST

Owns the handoffs; `decode_handoff.py` has them and their pulls, `prefill_peers.py` the conversation
with the prefill engines and the fence, which says until when a complete pull is valid, and
`decode_proof.py` judges whether a request may be decoded. A pull that is complete but not proven is
asked about (a renewal now) for a bounded time; no answer, and the KV is lost.

Blocks that a pull may still write to are handed to the engine as quarantined,
and freed one order at a time as the pulls end.
"""

from __future__ import annotations

import logging
from bisect import insort
from collections import deque

from tasuki.engine.api import KvHost, LegEndReason
from tasuki.errors import TasukiError
from tasuki.kv.config import HandoffConfig, HandoffCounters
from tasuki.kv.decode_handoff import DecodeHandoff, DecodePulls
from tasuki.kv.decode_proof import DecodeProof, Loss
from tasuki.kv.effects import Effect, PullDone, Redial
from tasuki.kv.pairs import LossCause
from tasuki.kv.prefill_peers import PrefillPeers
from tasuki.kv.wire import first_tokens_from_wire, prefilled_flaw
from tasuki.v1 import kv_pb2 as pb

log = logging.getLogger(__name__)


class DecodeSide:
    """All handoffs that this engine is the decode worker of.

    Args:
        host: the engine.
        config: times; the lease of a peer comes with its handshake.
        counters: pulls are counted here.
        identity: of the model, which digests are bound to.
    """

    def __init__(
        self,
        host: KvHost,
        config: HandoffConfig,
        counters: HandoffCounters,
        identity: bytes = b"",
    ) -> None:
        self._host = host
        self._config = config
        self._counters = counters
        self._handoffs: dict[str, DecodeHandoff] = {}
        self._waiting: deque[DecodeHandoff] = deque()
        self._effects: list[Effect] = []
        self._pulls = DecodePulls(config.pull_timeout_s, counters, self._effects)
        self._peers = PrefillPeers(config, self._handoffs, self._effects)
        self._proof = DecodeProof(config, counters, self._peers, identity)

    # What the engine thread reads.

    def drain(self) -> list[Effect]:
        """Take the effects since the last call, in order."""
        effects = self._effects.copy()
        self._effects.clear()
        return effects

    def next_deadline(self) -> float | None:
        """When `tick` is due next; None: nothing waits for time to pass."""
        waits = (self._proof.give_up_s(handoff) for handoff in self._handoffs.values())
        due = [due_s for due_s in waits if due_s is not None]
        return min([*due, *self._pulls.deadlines()], default=None)

    def needs(self, peer: str) -> bool:
        """Whether anything is left to say to `peer`."""
        return self._peers.needs(peer)

    @property
    def idle(self) -> bool:
        """Whether no handoff, pull or unanswered release is kept."""
        return not (self._handoffs or self._pulls.orders or self._peers.releasing)

    # Events of the router and the engine.

    def submit(self, request_id: str, peer: str, now_s: float, waited_s: float = 0.0) -> None:
        """A DECODE leg was submitted to the engine, which parked it.

        A second one under a live id is dropped, as the engine drops it.

        Args:
            waited_s: Since a worker first got a leg of the request: it stands in line for credit
                as if it had come then.
        """
        if request_id in self._handoffs:
            return
        greeted = self._peers.meet(peer, request_id)
        handoff = DecodeHandoff(request_id, peer, now_s, greeted, waited_s=waited_s)
        self._handoffs[request_id] = handoff
        insort(self._waiting, handoff, key=lambda known: known.since_s)
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
            self._peers.release(handoff, now_s, keep=False)

    # Events of the stream to a prefill engine.

    def on_connected(
        self, peer: str, lease_s: float, block_tokens: int, now_s: float, digests: bool = False
    ) -> None:
        """The handshake with `peer` is done, for the first time or again.

        Args:
            block_tokens: in a block of its own.
            digests: whether it sends them.
        """
        for handoff in self._handoffs.values():
            if handoff.peer == peer and not handoff.greeted:
                handoff.greeted = True
                handoff.greeted_s = now_s
                handoff.timings.handshake_s = now_s - handoff.submitted_s
        self._peers.connect(peer, lease_s, block_tokens, now_s, digests)

    def on_disconnected(self, peer: str) -> None:
        """The stream broke; it is being made anew."""
        self._peers.disconnect(peer)

    def on_peer_gone(
        self, peer: str, message: str, now_s: float, reason: LegEndReason = LegEndReason.KV_LOST
    ) -> None:
        """`peer` is no more, or will never talk to us: its handoffs end at once."""
        for handoff in [h for h in self._handoffs.values() if h.peer == peer]:
            self._counters.pairs.lost(peer, LossCause.PEER)
            self._end(handoff, reason, message, now_s, keep=False)
        self._peers.forget(peer)

    def on_message(
        self, peer: str, message: pb.FromPrefill, now_s: float, heard_s: float | None = None
    ) -> None:
        """A message of a prefill engine, after the handshake.

        Args:
            heard_s: when it came, for the account of where the time went; None: now.
        """
        match message.WhichOneof("message"):
            case "scheduled":
                if handoff := self._of(peer, message.scheduled.request_id):
                    self._scheduled(handoff, now_s)
            case "announce":
                if handoff := self._of(peer, message.announce.request_id):
                    self._announce(handoff, message.announce, now_s)
            case "prefilled":
                if handoff := self._of(peer, message.prefilled.request_id):
                    heard_s = now_s if heard_s is None else heard_s
                    self._prefilled(handoff, message.prefilled, now_s, heard_s)
            case "digests":
                if handoff := self._of(peer, message.digests.request_id):
                    self._digests(handoff, message.digests, now_s)
            case "renewed":
                self._renewed(peer, message.renewed, now_s)
            case "gone":
                self._peers.released(peer, message.gone.request_id)
                if handoff := self._of(peer, message.gone.request_id):
                    why = f"prefill worker {peer}: {message.gone.reason}"
                    self._lost(handoff, LossCause.LEASE, why, now_s)
            case _:
                pass  # a message of a later version

    def read_ahead(self, peer: str, announce: pb.Announce, now_s: float) -> bool:
        """Order the pull of announced blocks whose place is known, and nothing else.

        Possible at once, whatever the engine is busy with: the engine is not told.

        Returns:
            Whether a pull is ordered: that is all that the announcement means, then, and
            what remains follows from the pull's end. Else it is left to `on_message`.
        """
        handoff = self._of(peer, announce.request_id)
        if handoff is None or handoff.assignment is None:
            return False
        if announce.first_token > handoff.announced or handoff.flaw(announce):
            return False
        return self._read(handoff, announce, now_s)

    # Events of the transfer thread.

    def on_pull_progress(self, order_id: int, now_s: float) -> None:
        """A part of a pull has arrived."""
        self._pulls.progress(order_id, now_s)

    def on_pull_done(self, done: PullDone, now_s: float) -> None:
        """A pull ended: nothing of it writes to our blocks any more."""
        order = self._pulls.end(done, now_s)
        handoff = order.handoff
        self._counters.pairs.pulled(handoff.peer, done)
        if not done.error:
            handoff.timings.transport = self._counters.pairs.of(handoff.peer).name
        if self._handoffs.get(handoff.request_id) is not handoff:
            self._host.free_quarantined(order.local)
            return
        handoff.orders.discard(done.order_id)
        if done.error:
            why = f"pull from {handoff.peer} failed: {done.error}"
            self._lost(handoff, LossCause.TRANSFER, why, now_s)
            return
        if handoff.check is not None:
            handoff.check.arrived(done.digests)
        self._check(handoff, now_s)

    def tick(self, now_s: float) -> None:
        """Let time pass: credit, silent peers, pulls without progress."""
        self._credit(now_s)
        for handoff in list(self._handoffs.values()):
            due_s = self._proof.give_up_s(handoff)
            if due_s is not None and due_s <= now_s:
                silent = f"prefill worker {handoff.peer} has not answered in time"
                self._effects.append(Redial(handoff.peer))
                self._lost(handoff, LossCause.SILENT, silent, now_s)
        self._give_up_stuck(now_s)

    def beat(self, now_s: float) -> bool:
        """Send heartbeats and repeated releases that are due; calls no engine. Returns True."""
        self._peers.tick(now_s)
        return True

    def next_beat(self) -> float | None:
        """When `beat` is due next; None: there is nothing to say again."""
        return min(self._peers.deadlines(), default=None)

    # Inside: from submit to assigned.

    def _credit(self, now_s: float) -> None:
        """Give credit first come, first served: a large request is not overtaken for ever."""
        while self._waiting:
            handoff = self._waiting[0]
            if self._handoffs.get(handoff.request_id) is handoff:
                if not self._host.may_credit(handoff.request_id):
                    return
                handoff.credited_s = now_s
                self._peers.want(handoff, now_s)
            self._waiting.popleft()

    def _of(self, peer: str, request_id: str) -> DecodeHandoff | None:
        handoff = self._handoffs.get(request_id)
        return handoff if handoff is not None and handoff.peer == peer else None

    def _scheduled(self, handoff: DecodeHandoff, now_s: float) -> bool:
        """Assign blocks. Returns False when the handoff ended for want of room."""
        if handoff.assignment is not None:
            return True
        if handoff.credited_s is None:
            return False  # of an earlier handoff by this name
        handoff.scheduled = True
        try:
            assignment = self._host.assign(handoff.request_id)
        except TasukiError:  # the engine ended it, and has yet to tell
            self.on_leg_ended(handoff.request_id, now_s)
            return False
        if assignment is None:
            why = "no room for the request's KV: a larger --kv-memory, or more decode workers help"
            self._end(handoff, LegEndReason.REFUSED, why, now_s, keep=True)
            return False
        handoff.assigned(assignment, self._peers.block_tokens(handoff.peer))
        self._proof.begin(handoff)
        return True

    def _announce(self, handoff: DecodeHandoff, announce: pb.Announce, now_s: float) -> None:
        if not self._scheduled(handoff, now_s):
            return
        if announce.first_token > handoff.announced:  # one before it was lost: have it said again
            self._peers.answered(handoff, announce.heard)
            self._peers.renew(handoff.peer, [handoff], now_s)
            return
        if flaw := handoff.flaw(announce):
            why = f"prefill worker {handoff.peer} announced {flaw}"
            self._lost(handoff, LossCause.MESSAGE, why, now_s)
            return
        self._read(handoff, announce, now_s)
        self._check(handoff, now_s)

    def _digests(self, handoff: DecodeHandoff, digests: pb.Digests, now_s: float) -> None:
        if not self._scheduled(handoff, now_s) or handoff.check is None:
            return
        if flaw := handoff.check.hear(digests):
            why = f"prefill worker {handoff.peer} {flaw}"
            self._lost(handoff, LossCause.MESSAGE, why, now_s)
            return
        self._check(handoff, now_s)

    def _renewed(self, peer: str, renewed: pb.Renewed, now_s: float) -> None:
        alive, gone = set(renewed.alive), set(renewed.gone)
        for handoff in self._peers.asked(peer, renewed.seq):
            if self._handoffs.get(handoff.request_id) is not handoff:
                continue  # that one ended
            if handoff.request_id in alive:
                self._peers.answered(handoff, renewed.seq)
                self._check(handoff, now_s)
            elif handoff.request_id in gone:
                why = f"prefill worker {peer} has let its blocks go"
                self._lost(handoff, LossCause.LEASE, why, now_s)

    def _prefilled(
        self, handoff: DecodeHandoff, prefilled: pb.Prefilled, now_s: float, heard_s: float
    ) -> None:
        if handoff.prefilled is not None or handoff.credited_s is None:
            return
        if flaw := prefilled_flaw(prefilled):
            why = f"prefill worker {handoff.peer} {flaw}"
            self._lost(handoff, LossCause.MESSAGE, why, now_s)
            return
        if all(token.finished for token in prefilled.first_tokens):
            self._end(handoff, LegEndReason.FINISHED, "", now_s, keep=False)
        elif self._scheduled(handoff, now_s):
            handoff.prefilled, handoff.prefilled_s = prefilled, heard_s
            self._check(handoff, now_s)

    # Inside: from assigned to the end.

    def _read(self, handoff: DecodeHandoff, announce: pb.Announce, now_s: float) -> bool:
        """Take in what follows on the tokens that are known. Returns whether any is pulled."""
        self._peers.answered(handoff, announce.heard)
        handoff.hear(announce)
        pairs, blocks, check = handoff.take_unread()
        if pairs:
            self._pulls.begin(handoff, pairs, blocks, check, now_s)
        return bool(pairs)

    def _check(self, handoff: DecodeHandoff, now_s: float) -> None:
        """Start decoding if all is here and proven."""
        verdict = self._proof.judge(handoff, now_s)
        if isinstance(verdict, Loss):
            self._lost(handoff, verdict.cause, verdict.message, now_s)
        elif verdict:
            self._start(handoff, now_s)

    def _start(self, handoff: DecodeHandoff, now_s: float) -> None:
        assert handoff.prefilled is not None
        handoff.account(now_s, self._config.machine)
        self._counters.pairs.of(handoff.peer).exposed_s += handoff.timings.transfer_exposed_s
        del self._handoffs[handoff.request_id]
        self._peers.release(handoff, now_s, keep=False)
        first_tokens = first_tokens_from_wire(handoff.prefilled)
        self._host.start_decode(
            handoff.request_id, first_tokens, handoff.timings, sorted(handoff.hollow)
        )

    def _lost(self, handoff: DecodeHandoff, cause: LossCause, message: str, now_s: float) -> None:
        self._counters.pairs.lost(handoff.peer, cause)
        self._end(handoff, LegEndReason.KV_LOST, message, now_s, keep=False)

    def _end(
        self,
        handoff: DecodeHandoff,
        reason: LegEndReason,
        message: str,
        now_s: float,
        *,
        keep: bool,
    ) -> None:
        """End the leg; what pulls may still write to stays quarantined."""
        del self._handoffs[handoff.request_id]
        if handoff.credited_s is not None:
            self._peers.release(handoff, now_s, keep=keep)
        quarantine = self._pulls.cancel(handoff)
        self._host.end_decode_leg(
            handoff.request_id, reason, message, quarantine=quarantine, timings=handoff.timings
        )

    def _give_up_stuck(self, now_s: float) -> None:
        """End the handoffs of pulls that do not end; their blocks stay quarantined until then."""
        for order in self._pulls.take_stuck(now_s):
            handoff = order.handoff
            if self._handoffs.get(handoff.request_id) is handoff:
                self._counters.kv_pull_timeouts += 1
                message = order.complaint(now_s)
                log.warning("request_id=%s: %s", handoff.request_id, message)
                self._lost(handoff, LossCause.STUCK, message, now_s)
