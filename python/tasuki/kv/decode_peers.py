"""What the prefill worker says to decode engines, and what of it is said again.

Anything said may get lost, so a want or a renewal is answered with all that
its sender has not heard. Nothing is decided here: which leases an answer vouches for is decided in
`prefill_side.py`, which calls this.

Decode workers that ask for digests of announced blocks are sent these, too (`DigestsSent`). They
are ordered as the blocks are announced, and told when they are there: neither the announcement nor
the read waits for them. They are made for one decode worker, whose block size says what a unit is;
after a retarget they are made anew. No I/O, no clock.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tasuki.engine.api import Announced
from tasuki.kv.digest import Seal, Values
from tasuki.kv.effects import Digest, Digested, Effect, ToDecode
from tasuki.kv.prefill_handoff import PrefillHandoff
from tasuki.kv.wire import announce_to_wire
from tasuki.v1 import kv_pb2 as pb

log = logging.getLogger(__name__)


class DecodePeers:
    """Sends the prefill worker's messages to decode engines.

    A handoff's progress is told to its target, while that wants it and it is
    not ending; "gone" and the answers to renewals go to the engine that they are about.

    Args:
        effects: where what is to be said goes, in order.
    """

    def __init__(self, effects: list[Effect]) -> None:
        self._effects = effects

    def say_scheduled(self, handoff: PrefillHandoff) -> None:
        """The engine schedules it: blocks are needed over there."""
        scheduled = pb.Scheduled(request_id=handoff.request_id)
        self._say(handoff, pb.FromPrefill(scheduled=scheduled))

    def say_blocks(self, handoff: PrefillHandoff, heard_tokens: int) -> None:
        """Announce what the target has not heard, who knows of the first `heard_tokens` tokens."""
        items = [item for item in handoff.announced if item.end_token > heard_tokens]
        announce = announce_to_wire(handoff.request_id, items, handoff.heard)
        self._say(handoff, pb.FromPrefill(announce=announce))

    def say_digests(self, handoff: PrefillHandoff, heard_tokens: int) -> None:
        """Tell digests to the target, which has heard those of the first tokens."""
        for digests in handoff.digests:
            if digests.end_token > heard_tokens:
                self._say(handoff, pb.FromPrefill(digests=digests))

    def say_prefilled(self, handoff: PrefillHandoff) -> None:
        """All is computed; the first tokens go along."""
        self._say(handoff, pb.FromPrefill(prefilled=handoff.prefilled))

    def say_again(self, handoff: PrefillHandoff, heard: pb.Renewal) -> None:
        """Repeat what the target has not heard."""
        if handoff.scheduled and not heard.scheduled:
            self.say_scheduled(handoff)
        if handoff.tokens > heard.announced_tokens:
            self.say_blocks(handoff, heard.announced_tokens)
        self.say_digests(handoff, heard.digested_tokens)
        if handoff.prefilled is not None and not heard.prefilled:
            self.say_prefilled(handoff)

    def say_renewed(
        self, decode_engine: str, seq: int, alive: Sequence[str], gone: Sequence[str]
    ) -> None:
        """Answer the renewals of question `seq`, by request."""
        reply = pb.Renewed(seq=seq, alive=alive, gone=gone)
        self._effects.append(ToDecode(decode_engine, pb.FromPrefill(renewed=reply)))

    def say_gone(self, decode_engine: str, request_id: str, reason: str) -> None:
        """Nothing is kept for that engine by this name."""
        gone = pb.Gone(request_id=request_id, reason=reason)
        self._effects.append(ToDecode(decode_engine, pb.FromPrefill(gone=gone)))

    def _say(self, handoff: PrefillHandoff, message: pb.FromPrefill) -> None:
        if handoff.wanted and handoff.ending is None:
            self._effects.append(ToDecode(handoff.target, message))


@dataclass(frozen=True, slots=True)
class DigestSource:
    """What digests are made with.

    Attributes:
        identity: Of the model.
        block_tokens: In a block of ours.
        asked: By decode engine, what it asks for.
    """

    identity: bytes
    block_tokens: int
    asked: Mapping[str, pb.DigestRequest]


@dataclass(frozen=True, slots=True)
class _Order:
    """Digests that are being computed.

    Attributes:
        into: The handoff's digests when they were ordered; others by now if its target changed.
        places: Group and first token of each unit.
    """

    handoff: PrefillHandoff
    into: list[pb.Digests]
    item: Announced
    seal: Seal
    places: list[tuple[int, int]]


class DigestsSent:
    """Orders digests, and has them told.

    Args:
        source: What they are made with; None: there are none.
        peers: Tells them.
        effects: Where orders go.
    """

    def __init__(
        self, source: DigestSource | None, peers: DecodePeers, effects: list[Effect]
    ) -> None:
        self._source = source
        self._peers = peers
        self._effects = effects
        self._orders: dict[int, _Order] = {}
        self._next_id = 1

    def order(self, handoff: PrefillHandoff) -> None:
        """Have digests computed of what is announced to the target and has none."""
        source = self._source
        if source is None or not handoff.wanted or handoff.ending is not None:
            return
        ask = source.asked.get(handoff.target)
        if ask is None or not ask.block_size or not ask.one_in:
            return
        unit = math.gcd(ask.block_size, source.block_tokens)
        seal = Seal.of(source.identity, handoff.request_id, unit, ask.one_in)
        for item in handoff.announced[handoff.digests_ordered :]:
            places, units = self._units(item, seal)
            order = _Order(handoff, handoff.digests, item, seal, places)
            self._orders[self._next_id] = order
            self._effects.append(Digest(self._next_id, units, unit))
            self._next_id += 1
        handoff.digests_ordered = len(handoff.announced)

    def done(self, digested: Digested) -> None:
        """Digests were computed: tell them to the target, unless it has changed."""
        order = self._orders.pop(digested.order_id)
        handoff = order.handoff
        if order.into is not handoff.digests:
            return
        if digested.error:
            log.warning("request_id=%s: %s", handoff.request_id, digested.error)
            self._peers.say_gone(handoff.target, handoff.request_id, digested.error)
            return
        heads = max(part.first_head + part.values.shape[1] for part in digested.digests)
        values: Values = np.zeros((len(order.places), heads), dtype=np.uint64)
        for part in digested.digests:
            values[:, part.first_head : part.first_head + part.values.shape[1]] = part.values
        message = pb.Digests(
            request_id=handoff.request_id,
            first_token=order.item.first_token,
            end_token=order.item.end_token,
        )
        for group in dict.fromkeys(group for group, _ in order.places):
            rows = [row for row, place in enumerate(order.places) if place[0] == group]
            tokens = [order.places[row][1] for row in rows]
            sealed = order.seal.sealed(values[rows], group, tokens, 0)
            message.groups.add(group=group, tokens=tokens, values=sealed.astype("<u8").tobytes())
        handoff.digests.append(message)
        self._peers.say_digests(handoff, message.first_token)

    def _units(self, item: Announced, seal: Seal) -> tuple[list[tuple[int, int]], list[int]]:
        """Place and number of each unit of an announcement that has a digest."""
        assert self._source is not None
        unit, per_block = seal.unit_tokens, self._source.block_tokens // seal.unit_tokens
        places, units = [], []
        for part in item.parts:
            for token in seal.chosen(part.group, part.first_token, item.end_token):
                index = (token - part.first_token) // unit
                places.append((part.group, token))
                units.append(part.blocks[index // per_block] * per_block + index % per_block)
        return places, units
