"""What the prefill worker says to decode engines, and what of it is said again.

Anything said may get lost, so a want or a renewal is answered with all that
its sender has not heard. Nothing is decided here, and nothing kept: which
leases an answer vouches for is decided in `prefill_side.py`, which calls this.
"""

from __future__ import annotations

from collections.abc import Sequence

from tasuki.kv.effects import Effect, ToDecode
from tasuki.kv.prefill_handoff import PrefillHandoff
from tasuki.kv.wire import announce_to_wire
from tasuki.v1 import kv_pb2 as pb


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
