"""State machines of the handoff that are broken on purpose: searches must catch each."""

from __future__ import annotations

from dataclasses import replace

from handoff_model import LEASE_S, Sides

from tasuki.engine.api import LegEndReason
from tasuki.kv.decode_proof import DecodeProof
from tasuki.kv.decode_side import DecodeSide
from tasuki.kv.effects import Effect, Pull, PullDone
from tasuki.kv.prefill_handoff import ParkedWants
from tasuki.kv.prefill_peers import PrefillPeers
from tasuki.kv.prefill_side import PrefillSide


class NoFence(DecodeSide):
    """Accepts whatever has arrived."""

    def _check(self, handoff, now_s):  # type: ignore[no-untyped-def]
        handoff.acked_s = float("inf")
        super()._check(handoff, now_s)


class AckTimePeers(PrefillPeers):
    """Dates a question when its answer comes."""

    def date(self, peer, seq, now_s):  # type: ignore[no-untyped-def]
        known = self._peers.get(peer)
        if known is not None and seq in known.asked:
            known.asked[seq] = (now_s, known.asked[seq][1])


class AckTimeFence(DecodeSide):
    """Counts the lease from the answer instead of from the question."""

    def __init__(self, host, config, counters):  # type: ignore[no-untyped-def]
        super().__init__(host, config, counters)
        self._peers = AckTimePeers(config, self._handoffs, self._effects)
        self._proof = DecodeProof(config, counters, self._peers, b"")

    def on_message(self, peer, message, now_s):  # type: ignore[no-untyped-def]
        for seq in (message.renewed.seq, message.announce.heard):
            self._peers.date(peer, seq, now_s)
        super().on_message(peer, message, now_s)


class AnnouncementIsProof(DecodeSide):
    """Takes any announcement for an answer to the want, whenever it was sent."""

    def _announce(self, handoff, announce, now_s):  # type: ignore[no-untyped-def]
        if handoff.credited_s is not None:
            handoff.acked_s = max(handoff.acked_s, handoff.credited_s)
        super()._announce(handoff, announce, now_s)


class NamePeers(PrefillPeers):
    """Does not look which handoff by that name a question was about."""

    def answered(self, handoff, seq):  # type: ignore[no-untyped-def]
        sent_s, _ = self._peers[handoff.peer].asked.get(seq, (0.0, []))
        if seq in self._peers[handoff.peer].asked:
            handoff.acked_s = max(handoff.acked_s, sent_s, handoff.credited_s)


class NameIsProof(DecodeSide):
    """Takes an answer about an earlier handoff by the same name."""

    def __init__(self, host, config, counters):  # type: ignore[no-untyped-def]
        super().__init__(host, config, counters)
        self._peers = NamePeers(config, self._handoffs, self._effects)
        self._proof = DecodeProof(config, counters, self._peers, b"")


class NoQuarantine(DecodeSide):
    """Gives blocks back while transfers still write to them."""

    def _end(self, handoff, reason, message, now_s, *, keep):  # type: ignore[no-untyped-def]
        handoff.orders.clear()
        super()._end(handoff, reason, message, now_s, keep=keep)

    def on_pull_done(self, done: PullDone, now_s: float) -> None:
        handoff = self._pulls.orders[done.order_id].handoff
        if self._handoffs.get(handoff.request_id) is handoff:
            super().on_pull_done(done, now_s)
        else:
            del self._pulls.orders[done.order_id]


class ForgottenQuarantine(DecodeSide):
    """Never gives quarantined blocks back."""

    def on_pull_done(self, done: PullDone, now_s: float) -> None:
        handoff = self._pulls.orders[done.order_id].handoff
        if self._handoffs.get(handoff.request_id) is handoff:
            super().on_pull_done(done, now_s)
        else:
            del self._pulls.orders[done.order_id]


class SkipsGaps(DecodeSide):
    """Takes what it reads ahead for what follows on the tokens that it knows."""

    def read_ahead(self, peer, announce, now_s):  # type: ignore[no-untyped-def]
        handoff = self._of(peer, announce.request_id)
        if handoff is not None and handoff.assignment is not None:
            announce.first_token = min(announce.first_token, handoff.announced)
            for part in announce.groups:
                part.first_token = announce.first_token
                announce.end_token = part.first_token + len(part.blocks)
        return super().read_ahead(peer, announce, now_s)


class ReadsAnotherSlot(DecodeSide):
    """Reads the unit beside the one that it should."""

    def drain(self) -> list[Effect]:
        return [
            replace(e, pairs=[(max(0, remote - 1), ours) for remote, ours in e.pairs])
            if isinstance(e, Pull)
            else e
            for e in super().drain()
        ]


class ForgetsTheRest(DecodeSide):
    """Takes a local block for read when the first announcement that touches it is."""

    def _read(self, handoff, announce, now_s):  # type: ignore[no-untyped-def]
        read = super()._read(handoff, announce, now_s)
        size = handoff.assignment.block_size
        handoff.posted = max(handoff.posted, -(-handoff.announced // size) * size)
        return read


class ReadsAndForgets(DecodeSide):
    """Orders pulls without keeping them for the end of the request."""

    def read_ahead(self, peer, announce, now_s):  # type: ignore[no-untyped-def]
        read = super().read_ahead(peer, announce, now_s)
        if handoff := self._of(peer, announce.request_id):
            handoff.orders.clear()
        return read


class EndlessProof(DecodeProof):
    def give_up_s(self, handoff):  # type: ignore[no-untyped-def]
        return None


class NeverGivesUp(DecodeSide):
    """Waits for a silent prefill worker for ever."""

    def __init__(self, host, config, counters):  # type: ignore[no-untyped-def]
        super().__init__(host, config, counters)
        self._proof = EndlessProof(config, counters, self._peers, b"")


class FreesOnAbort(PrefillSide):
    """Frees announced blocks as soon as the router aborts."""

    def abort(self, request_id: str, now_s: float) -> bool:
        known = super().abort(request_id, now_s)
        handoff = self._handoffs.get(request_id)
        if handoff is not None and handoff.ending is not None:
            handoff.target = ""
            handoff.residual.clear()
            self._settle(handoff, now_s)
        return known


class FreesOnRetarget(PrefillSide):
    """Forgets what an earlier decode worker may still accept."""

    def _drop_target(self, handoff):  # type: ignore[no-untyped-def]
        super()._drop_target(handoff)
        handoff.residual.clear()


class LeaseComesBack(PrefillSide):
    """Answers "alive" to whoever asks."""

    def _renew(self, decode_engine, renewal, seq, now_s):  # type: ignore[no-untyped-def]
        super()._renew(decode_engine, renewal, seq, now_s)
        return True


class NeverExpires(PrefillSide):
    """Keeps blocks for a decode worker that is no more."""

    def _expire(self, handoff, now_s):  # type: ignore[no-untyped-def]
        handoff.expires_s = now_s + 1.0


class ExpiresEarly(PrefillSide):
    """Counts the lease short."""

    def _extend(self, handoff, seq, now_s):  # type: ignore[no-untyped-def]
        super()._extend(handoff, seq, now_s - 0.5 * LEASE_S)


class WantIsNoRenewal(PrefillSide):
    """Says that a want was heard, but lets the lease end as if it was not."""

    def _on_want(self, decode_engine, want, now_s):  # type: ignore[no-untyped-def]
        super()._on_want(decode_engine, want, now_s - LEASE_S)


class NoLeaseForWhatIsAhead(PrefillSide):
    """Announces what it has computed ahead of credit, but grants no lease for it."""

    def _grant(self, handoff, now_s):  # type: ignore[no-untyped-def]
        if handoff.prefilled is None:
            super()._grant(handoff, now_s)


class RemembersTurns(PrefillSide):
    """Says that it heard the target when it heard the one before it."""

    def _drop_target(self, handoff):  # type: ignore[no-untyped-def]
        heard = handoff.heard
        super()._drop_target(handoff)
        handoff.heard = heard


class ForgetsWants(PrefillSide):
    """Never lets a parked want go."""

    def tick(self, now_s: float) -> None:
        parked, self._parked = self._parked, ParkedWants(0.0)
        super().tick(now_s)
        self._parked = parked


class DoubleEnd(PrefillSide):
    """Ends the leg on a release without regard to whose it is."""

    def _on_release(self, decode_engine, request_id, keep, now_s):  # type: ignore[no-untyped-def]
        handoff = self._handoffs.get(request_id)
        if handoff is not None and not handoff.leg_over:
            self._bury(handoff, now_s)
            self._host.end_prefill_leg(request_id, LegEndReason.HANDED_OFF)
            return
        super()._on_release(decode_engine, request_id, keep, now_s)


BROKEN = [
    Sides(decode=NoFence),
    Sides(decode=AckTimeFence),
    Sides(decode=AnnouncementIsProof),
    Sides(decode=NameIsProof),
    Sides(decode=NoQuarantine),
    Sides(decode=ForgottenQuarantine),
    Sides(decode=SkipsGaps),
    Sides(decode=ReadsAnotherSlot),
    Sides(decode=ForgetsTheRest),
    Sides(decode=ReadsAndForgets),
    Sides(decode=NeverGivesUp),
    Sides(prefill=FreesOnAbort),
    Sides(prefill=FreesOnRetarget),
    Sides(prefill=LeaseComesBack),
    Sides(prefill=NeverExpires),
    Sides(prefill=ExpiresEarly),
    Sides(prefill=ForgetsWants),
    Sides(prefill=NoLeaseForWhatIsAhead),
    Sides(prefill=DoubleEnd),
]
