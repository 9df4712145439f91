"""The decode worker's talk with prefill engines: what was asked when, and what it proves.

Owns the prefill engines by name: whether each can be talked to, the questions
asked of it, the releases it has yet to answer, and when all is said again.
Anything said may get lost. What becomes of a handoff is decided in
`decode_side.py`, which calls this. Nothing here calls the engine: heartbeats are
sent by the loop's thread, whatever the engine thread computes.

The fence. `acked_s` is when we sent the last want or renewal that the prefill
worker answered: a renewal with "alive", either with an announcement that says
it was heard. It keeps every announced block from then for a whole lease, so a
pull seen complete at T is valid iff

    T <= acked_s + lease_s - margin_s

An announcement answers the want that it follows, so nothing is asked where all
goes well. A renewal sent after T and acknowledged proves it too, by the same
line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tasuki.kv.config import HandoffConfig
from tasuki.kv.decode_handoff import NEVER_S, DecodeHandoff
from tasuki.kv.effects import Effect, ToPrefill
from tasuki.v1 import kv_pb2 as pb


@dataclass(slots=True)
class _Peer:
    """One prefill engine.

    Attributes:
        block_tokens: in a block of its own; known once it was connected.
        asked: when each want and renewal of late was sent, and what it was about.
        releasing: request: (keep, until when it is repeated).
    """

    lease_s: float
    block_tokens: int = 0
    digests: bool = False
    connected: bool = False
    heartbeat_s: float = NEVER_S
    asked: dict[int, tuple[float, list[DecodeHandoff]]] = field(default_factory=dict)
    releasing: dict[str, tuple[bool, float]] = field(default_factory=dict)


class PrefillPeers:
    """Every prefill engine that this one has handoffs with, or has yet to release.

    Args:
        config: times; the lease of a peer comes with its handshake.
        handoffs: the live ones by request; read here, changed by their owner.
        effects: where what is to be said goes, in order.
    """

    def __init__(
        self,
        config: HandoffConfig,
        handoffs: Mapping[str, DecodeHandoff],
        effects: list[Effect],
    ) -> None:
        self._config = config
        self._handoffs = handoffs
        self._effects = effects
        self._peers: dict[str, _Peer] = {}
        self._next_seq = 1  # never used twice, whatever becomes of the peer

    # What is known.

    def needs(self, peer: str) -> bool:
        """Whether anything is left to say to `peer`."""
        known = self._peers.get(peer)
        return bool(known and known.releasing) or any(
            h.peer == peer for h in self._handoffs.values()
        )

    @property
    def releasing(self) -> bool:
        """Whether any release is unanswered."""
        return any(known.releasing for known in self._peers.values())

    def lease_s(self, peer: str) -> float:
        """How long `peer` keeps announced blocks, in seconds."""
        return self._peers[peer].lease_s

    def block_tokens(self, peer: str) -> int:
        """Tokens in a block of `peer`, which was connected."""
        return self._peers[peer].block_tokens

    def digests(self, peer: str) -> bool:
        """Whether `peer` sends the digests that are asked for."""
        return self._peers[peer].digests

    def fence_s(self, handoff: DecodeHandoff) -> float:
        """The fence: reads seen complete until then are valid."""
        return handoff.acked_s + self.lease_s(handoff.peer) * (1.0 - self._config.margin_fraction)

    def deadlines(self) -> Iterator[float]:
        """Each time at which `tick` has something to do."""
        for peer, known in self._peers.items():
            if self._beats(peer, known):
                yield self._beat_due_s(known)
            for _, until_s in known.releasing.values():
                yield until_s

    # What becomes of a peer.

    def meet(self, peer: str, request_id: str) -> bool:
        """A handoff with `peer` begins; an earlier one by its name is released no more.

        Returns:
            Whether the handshake is done.
        """
        known = self._peers.setdefault(peer, _Peer(self._config.lease_s))
        known.releasing.pop(request_id, None)
        return known.connected

    def connect(
        self, peer: str, lease_s: float, block_tokens: int, now_s: float, digests: bool = False
    ) -> None:
        """The handshake with `peer` is done, for the first time or again: say everything."""
        known = self._peers.setdefault(peer, _Peer(lease_s))
        known.lease_s, known.block_tokens = lease_s, block_tokens
        known.digests = digests
        known.connected = True
        self._beat(peer, known, now_s)

    def disconnect(self, peer: str) -> None:
        """The stream broke: nothing can be said for now."""
        if known := self._peers.get(peer):
            known.connected = False

    def forget(self, peer: str) -> None:
        """`peer` is no more."""
        self._peers.pop(peer, None)

    def tick(self, now_s: float) -> None:
        """Let time pass: heartbeats, releases that nobody answers, peers without need."""
        for peer, known in list(self._peers.items()):
            for request_id, (_, until_s) in list(known.releasing.items()):
                if until_s <= now_s:
                    del known.releasing[request_id]
            if self._beats(peer, known) and self._beat_due_s(known) <= now_s:
                self._beat(peer, known, now_s)
            elif not known.connected and not self.needs(peer):
                del self._peers[peer]

    # What is said.

    def want(self, handoff: DecodeHandoff, now_s: float) -> None:
        """There is credit: ask for the KV."""
        known = self._peers[handoff.peer]
        if not known.connected:
            return  # connecting says it
        want = pb.Want(
            request_id=handoff.request_id,
            seq=self._ask(known, [handoff], now_s),
        )
        self._say(handoff.peer, pb.FromDecode(want=want))

    def renew(self, peer: str, handoffs: list[DecodeHandoff], now_s: float) -> None:
        """Ask for another lease, and for what of these has not been heard."""
        known = self._peers[peer]
        if not known.connected:
            return  # connecting again renews all
        renewals = [
            pb.Renewal(
                request_id=h.request_id,
                scheduled=h.scheduled,
                announced_tokens=h.announced,
                prefilled=h.prefilled is not None,
                digested_tokens=h.check.told if h.check else 0,
            )
            for h in handoffs
        ]
        seq = self._ask(known, handoffs, now_s)
        self._say(peer, pb.FromDecode(renew=pb.Renew(seq=seq, renewals=renewals)))

    def release(self, handoff: DecodeHandoff, now_s: float, *, keep: bool) -> None:
        """Nothing of it is read any more; repeated until it is answered.

        Args:
            keep: another decode worker may still get it.
        """
        known = self._peers[handoff.peer]
        known.releasing[handoff.request_id] = (keep, now_s + 2 * known.lease_s)
        release = pb.Release(request_ids=[handoff.request_id], keep=keep)
        self._say(handoff.peer, pb.FromDecode(release=release))

    # What is answered.

    def asked(self, peer: str, seq: int) -> Sequence[DecodeHandoff]:
        """What the question `seq` was about; nothing if it was not asked of late."""
        known = self._peers.get(peer)
        return [] if known is None or seq not in known.asked else known.asked[seq][1]

    def answered(self, handoff: DecodeHandoff, seq: int) -> None:
        """The lease lasts from when that question arrived, hence from when it was sent."""
        sent_s, asked = self._peers[handoff.peer].asked.get(seq, (NEVER_S, []))
        if any(one is handoff for one in asked):  # not one of that name before it
            handoff.acked_s = max(handoff.acked_s, sent_s)

    def released(self, peer: str, request_id: str) -> None:
        """`peer` keeps nothing by that name."""
        if known := self._peers.get(peer):
            known.releasing.pop(request_id, None)

    # Inside.

    def _ask(self, known: _Peer, handoffs: list[DecodeHandoff], now_s: float) -> int:
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

    def _beat(self, peer: str, known: _Peer, now_s: float) -> None:
        """Say everything again that may have got lost."""
        known.heartbeat_s = now_s
        if not known.connected:
            return
        live = [h for h in self._handoffs.values() if h.peer == peer and h.credited_s is not None]
        for handoff in live:
            if not handoff.scheduled:
                self.want(handoff, now_s)
        if live:
            self.renew(peer, live, now_s)
        for keep in (False, True):
            ids = [name for name, (kept, _) in known.releasing.items() if kept is keep]
            if ids:
                release = pb.Release(request_ids=ids, keep=keep)
                self._say(peer, pb.FromDecode(release=release))

    def _say(self, peer: str, message: pb.FromDecode) -> None:
        if self._peers[peer].connected:
            self._effects.append(ToPrefill(peer, message))

    def _beats(self, peer: str, known: _Peer) -> bool:
        return known.connected and (
            bool(known.releasing)
            or any(h.peer == peer and h.credited_s is not None for h in self._handoffs.values())
        )

    def _beat_due_s(self, known: _Peer) -> float:
        return known.heartbeat_s + known.lease_s / self._config.heartbeats_per_lease
