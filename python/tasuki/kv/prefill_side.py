"""The prefill worker's side of every handoff, as a state machine.

Time and messages go in, `ToDecode` effects come out, and the engine is told
through `KvHost`. No I/O, no clock, no threads: the engine thread calls it (see
`handoff.py`; `read_ahead` alone is called by the loop's thread, too), and so does the
test that tries every order of events.

    submit ──▶ waiting ──want──▶ admitted ──first announcement──▶ leased ──▶ ended
                                                                  │  ▲
                                                            renew └──┘

The engine may compute before the want comes. What it has computed by then is announced
when the want comes, and not before: only the announcing waits.

What makes the decode worker's reads safe:

- The lease runs from the first announcement; a want or a renewal moves its end
  to a lease after the moment it arrived. Announced blocks are given up only
  when the lease ran out or its holder released them: a router's abort stops
  computing, no more.
- An announcement names the last want or renewal of its receiver that did so.
  What came before the first announcement counts as well: the lease that began
  after it ends later still.
- A lease that is gone is never answered "alive" again.
- After a retarget the earlier holder may still accept what it has read, until
  its own lease runs out: the blocks stay until then (`residual`).

`prefill_handoff.py` has the state of each, and what is known of requests without a handoff,
`decode_peers.py` the words for what is decided here, and the digests of what is announced.
"""

from __future__ import annotations

from collections.abc import Sequence

from tasuki.engine.api import Announced, KvHost, LegEndReason, Prefilled
from tasuki.kv.config import HandoffConfig, HandoffCounters
from tasuki.kv.decode_peers import DecodePeers, DigestSource, DigestsSent
from tasuki.kv.effects import Digested, Effect
from tasuki.kv.prefill_handoff import EndedRequests, ParkedWants, PrefillHandoff
from tasuki.kv.wire import prefilled_to_wire
from tasuki.v1 import kv_pb2 as pb


class PrefillSide:
    """All handoffs that this engine is the prefill worker of.

    Args:
        host: the engine.
        config: times.
        counters: leases are counted here.
        digests: what digests for decode workers are made with; None: there are none.
    """

    def __init__(
        self,
        host: KvHost,
        config: HandoffConfig,
        counters: HandoffCounters,
        digests: DigestSource | None = None,
    ) -> None:
        self._host = host
        self._machine = config.machine
        self._lease_s = config.lease_s
        self._counters = counters
        self._handoffs: dict[str, PrefillHandoff] = {}
        self._parked = ParkedWants(config.park_leases * config.lease_s)
        self._ended = EndedRequests(10 * config.lease_s)
        self._credited: list[str] = []  # wanted, and the engine is yet to be told
        self._effects: list[Effect] = []
        self._peers = DecodePeers(self._effects)
        self._digests = DigestsSent(digests, self._peers, self._effects)

    # What the engine thread reads.

    def drain(self) -> list[Effect]:
        """Take the effects since the last call, in order."""
        effects = self._effects.copy()
        self._effects.clear()
        return effects

    def next_deadline(self) -> float | None:
        """When `tick` is due next; None: nothing waits for time to pass."""
        due = [due_s for handoff in self._handoffs.values() for due_s in handoff.deadlines()]
        return min([*due, *self._parked.deadlines()], default=None)

    @property
    def leased_blocks(self) -> int:
        """Blocks announced and not given up."""
        return sum(h.num_blocks for h in self._handoffs.values() if h.leased)

    @property
    def idle(self) -> bool:
        """Whether no handoff and no want is kept."""
        return not self._handoffs and not self._parked

    # Events of the router and the engine.

    def submit(self, request_id: str, decode_engine: str, now_s: float) -> None:
        """A PREFILL leg was submitted to the engine.

        A second one under a live id is dropped, as the engine drops it.
        """
        if request_id in self._handoffs:
            return
        handoff = PrefillHandoff(request_id, decode_engine)
        self._handoffs[request_id] = handoff
        self._ended.discard(request_id)
        self._unpark(handoff, now_s)
        self._admit()

    def abort(self, request_id: str, now_s: float) -> bool:
        """The router wants no more of it. Announced blocks wait for release or expiry.

        Returns:
            Whether there was such a handoff.
        """
        handoff = self._handoffs.get(request_id)
        if handoff is None:
            for decode_engine in self._parked.take_all(request_id):
                self._peers.say_gone(decode_engine, request_id, "aborted")
            return False
        if handoff.ending is None and not handoff.leg_over:
            if handoff.wanted:
                self._peers.say_gone(handoff.target, request_id, "aborted")
            handoff.ending = (LegEndReason.ABORTED, "")
            if handoff.expires_s is None:
                handoff.target = ""
            self._settle(handoff, now_s)
        return True

    def retarget(self, request_id: str, decode_engine: str, now_s: float) -> bool:
        """Hand over to another decode worker; computed and announced blocks are kept.

        Returns:
            False when there is nothing (any more) to hand over.
        """
        handoff = self._handoffs.get(request_id)
        if handoff is None or handoff.ending is not None or handoff.leg_over:
            return False
        if handoff.target == decode_engine:
            return True
        self._drop_target(handoff)
        handoff.target = decode_engine
        handoff.past.discard(decode_engine)
        if handoff.expires_s is not None:
            self._grant(handoff, now_s)
        self._unpark(handoff, now_s)
        self._admit()
        return True

    def on_started(self, request_ids: Sequence[str]) -> None:
        """The first chunks of these legs are about to be computed."""
        for request_id in request_ids:
            if handoff := self._handoffs.get(request_id):
                handoff.scheduled = True
                self._peers.say_scheduled(handoff)

    def on_step(
        self, announced: Sequence[Announced], prefilled: Sequence[Prefilled], now_s: float
    ) -> None:
        """What one engine step brought for PREFILL legs."""
        for item in announced:
            if handoff := self._handoffs.get(item.request_id):
                self._announced(handoff, item, now_s)
        for end in prefilled:
            if handoff := self._handoffs.get(end.request_id):
                self._prefilled(handoff, end, now_s)

    def on_leg_ended(self, request_id: str, now_s: float) -> None:
        """The engine ended the leg by itself: rejected, failed, or over at its first token."""
        handoff = self._handoffs.get(request_id)
        if handoff is None or handoff.leg_over:
            return
        if handoff.wanted:
            self._peers.say_gone(handoff.target, request_id, "the prefill leg ended")
        self._bury(handoff, now_s)

    def on_digested(self, digested: Digested) -> None:
        """Digests of announced blocks were computed."""
        self._digests.done(digested)

    # Events of the streams.

    def on_message(self, decode_engine: str, message: pb.FromDecode, now_s: float) -> None:
        """A message of a decode engine.

        Args:
            now_s: read off the clock after the message was received.
        """
        if not self.read_ahead(decode_engine, message, now_s) and message.HasField("release"):
            for request_id in message.release.request_ids:
                self._on_release(decode_engine, request_id, message.release.keep, now_s)
        self._admit()

    def read_ahead(self, decode_engine: str, message: pb.FromDecode, now_s: float) -> bool:
        """Answer a want or a renewal, which extends the lease, without calling the engine.

        So a step of any length delays neither. What the engine has to hear of it waits
        for the next `tick` (`tells_engine`).

        Returns:
            Whether the message was one of these.
        """
        match message.WhichOneof("message"):
            case "want":
                self._on_want(decode_engine, message.want, now_s)
            case "renew":
                self._on_renew(decode_engine, message.renew, now_s)
            case _:
                return False  # a release, or a message of a later version
        return True

    @property
    def tells_engine(self) -> bool:
        """Whether the next `tick` has something to tell the engine."""
        return bool(self._credited)

    def tick(self, now_s: float) -> None:
        """Let time pass: leases, parked wants, tombstones; and admit what was read ahead."""
        self._admit()
        for handoff in list(self._handoffs.values()):
            expired = handoff.drop_residual(now_s)
            if handoff.expires_s is not None and handoff.expires_s <= now_s:
                self._expire(handoff, now_s)
            elif expired:
                self._settle(handoff, now_s)
        for request_id, decode_engine in self._parked.expire(now_s):
            self._peers.say_gone(decode_engine, request_id, "no such request came from the router")
        self._ended.expire(now_s)

    # Inside.

    def _on_want(self, decode_engine: str, want: pb.Want, now_s: float) -> None:
        handoff = self._handoffs.get(want.request_id)
        if handoff is None and want.request_id not in self._ended:
            self._parked.add(want.request_id, decode_engine, want.seq, now_s)
        elif handoff is None or handoff.ending is not None or decode_engine in handoff.past:
            self._peers.say_gone(decode_engine, want.request_id, "ended")
        elif handoff.target != decode_engine:  # its retarget may be on the way
            self._parked.add(want.request_id, decode_engine, want.seq, now_s)
        elif not handoff.wanted:
            self._extend(handoff, want.seq, now_s)
            self._want(handoff, now_s)

    def _unpark(self, handoff: PrefillHandoff, now_s: float) -> None:
        """The want of its target may have come first; the lease, if there is one, began since."""
        seq = self._parked.take(handoff.request_id, handoff.target)
        if seq is not None:
            handoff.heard = seq
            self._want(handoff, now_s)

    def _extend(self, handoff: PrefillHandoff, seq: int, now_s: float) -> None:
        """The target cares: the lease, if it runs, lasts for a whole one from now."""
        handoff.heard = max(handoff.heard, seq)
        if handoff.expires_s is not None:
            handoff.expires_s = max(handoff.expires_s, now_s + self._lease_s)

    def _want(self, handoff: PrefillHandoff, now_s: float) -> None:
        """The target has credit: let the engine compute, and say what there is."""
        handoff.wanted = True
        if not handoff.admitted:
            handoff.admitted = True
            self._credited.append(handoff.request_id)
            if handoff.announced:  # computed ahead, announced now
                self._grant(handoff, now_s)
        self._peers.say_again(handoff, pb.Renewal(request_id=handoff.request_id))
        self._digests.order(handoff)

    def _admit(self) -> None:
        """Tell the engine of credits that have come."""
        credited, self._credited = self._credited, []
        for request_id in credited:
            if (handoff := self._handoffs.get(request_id)) is not None and handoff.admitted:
                self._host.admit(request_id)

    def _on_renew(self, decode_engine: str, renew: pb.Renew, now_s: float) -> None:
        alive: list[str] = []
        gone: list[str] = []
        for renewal in renew.renewals:
            answer = self._renew(decode_engine, renewal, renew.seq, now_s)
            if answer is not None:
                (alive if answer else gone).append(renewal.request_id)
        self._peers.say_renewed(decode_engine, renew.seq, alive, gone)

    def _renew(
        self, decode_engine: str, renewal: pb.Renewal, seq: int, now_s: float
    ) -> bool | None:
        """True: alive; False: gone; None: nothing to say about it."""
        handoff = self._handoffs.get(renewal.request_id)
        heard = renewal.scheduled or renewal.announced_tokens > 0 or renewal.prefilled
        if handoff is None or handoff.target != decode_engine:
            if heard or (handoff is None and renewal.request_id in self._ended):
                return False
            if handoff is not None and (handoff.ending or decode_engine in handoff.past):
                return False
            return True if self._parked.holds(renewal.request_id, decode_engine) else None
        if handoff.ending is not None:
            return False
        if handoff.leg_over:  # nothing moves; it need only hear the end
            self._peers.say_again(handoff, renewal)
            return None
        self._extend(handoff, seq, now_s)
        if not handoff.wanted:
            self._want(handoff, now_s)
        self._peers.say_again(handoff, renewal)
        self._digests.order(handoff)
        return True

    def _on_release(self, decode_engine: str, request_id: str, keep: bool, now_s: float) -> None:
        self._parked.take(request_id, decode_engine)
        self._peers.say_gone(decode_engine, request_id, "released")
        handoff = self._handoffs.get(request_id)
        if handoff is None:
            return
        if handoff.target != decode_engine:
            if handoff.residual.pop(decode_engine, None) is not None:
                self._settle(handoff, now_s)
            return
        if handoff.leg_over:
            self._bury(handoff, now_s)
            return
        handoff.leave_target()
        if handoff.ending is None and keep:
            if handoff.expires_s is not None:  # for as long the router may retarget it
                handoff.expires_s = now_s + self._lease_s
            return
        if handoff.ending is None:
            handoff.ending = (
                (LegEndReason.HANDED_OFF, "")
                if handoff.prefilled is not None
                else (LegEndReason.FAILED, f"decode worker {decode_engine} gave the request up")
            )
        handoff.expires_s = None
        self._settle(handoff, now_s)

    def _announced(self, handoff: PrefillHandoff, item: Announced, now_s: float) -> None:
        known = handoff.tokens
        assert item.first_token == known, (item.first_token, known)
        handoff.announced.append(item)
        if handoff.expires_s is None and handoff.ending is None and handoff.admitted:
            self._grant(handoff, now_s)
        self._peers.say_blocks(handoff, known)
        self._digests.order(handoff)

    def _prefilled(self, handoff: PrefillHandoff, end: Prefilled, now_s: float) -> None:
        handoff.prefilled = prefilled_to_wire(end, now_s, self._machine)
        self._peers.say_prefilled(handoff)
        if all(token.finished for token in end.first_tokens):
            handoff.leg_over = True
            if handoff.expires_s is None:
                handoff.expires_s = now_s + self._lease_s  # how long the end is repeated

    def _grant(self, handoff: PrefillHandoff, now_s: float) -> None:
        handoff.expires_s = now_s + self._lease_s
        self._counters.leases_granted += 1

    def _expire(self, handoff: PrefillHandoff, now_s: float) -> None:
        if handoff.leg_over:
            self._bury(handoff, now_s)
            return
        self._counters.leases_expired += 1
        if handoff.ending is None:
            who = handoff.target or "no decode worker"
            handoff.ending = (
                LegEndReason.FAILED,
                f"the KV's lease of {self._lease_s:g} s ran out: {who} did not renew it",
            )
        if handoff.target:
            self._peers.say_gone(handoff.target, handoff.request_id, "the lease ran out")
        handoff.target = ""
        handoff.expires_s = None
        self._settle(handoff, now_s)

    def _drop_target(self, handoff: PrefillHandoff) -> None:
        """The target loses the handoff, but for what it may have read already."""
        if handoff.target:
            if handoff.wanted:
                self._peers.say_gone(handoff.target, handoff.request_id, "retargeted")
            if handoff.expires_s is not None:
                handoff.residual[handoff.target] = handoff.expires_s
            handoff.past.add(handoff.target)
        handoff.leave_target()

    def _settle(self, handoff: PrefillHandoff, now_s: float) -> None:
        """End the leg once nobody may accept a read of its blocks any more."""
        if handoff.ending is None or handoff.target or handoff.residual:
            return
        reason, message = handoff.ending
        self._bury(handoff, now_s)
        if not handoff.leg_over:
            self._host.end_prefill_leg(handoff.request_id, reason, message)

    def _bury(self, handoff: PrefillHandoff, now_s: float) -> None:
        """Forget a handoff but for its name, so that a late want is refused at once."""
        del self._handoffs[handoff.request_id]
        self._ended.add(handoff.request_id, now_s)
