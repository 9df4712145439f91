"""Carries out the effects of the two state machines, and keeps the links to prefill engines.

Under the lock of `handoff.py`, which says what of the machines it is about.
"""

from __future__ import annotations

from collections.abc import Iterable

from tasuki.kv.decode_side import DecodeSide
from tasuki.kv.effects import CancelPull, Digest, Effect, Pull, Redial, ToDecode, ToPrefill
from tasuki.kv.ranked import RankedPuller
from tasuki.kv.streams import Streams
from tasuki.v1 import kv_pb2


class Carrier:
    """Messages go by the streams, pulls by the transfer threads of all ranks.

    Args:
        streams: to other engines.
        pullers: of all ranks.
        decode: is told when a link is given up to be made anew.
    """

    def __init__(self, streams: Streams, pullers: RankedPuller, decode: DecodeSide) -> None:
        self._streams = streams
        self._pullers = pullers
        self._decode = decode
        self._endpoints: dict[str, str] = {}  # prefill engines with a link
        self._connected: set[str] = set()

    def carry_out(self, effects: Iterable[Effect]) -> None:
        """Do all of it; in order for each peer."""
        to_prefill: dict[str, list[kv_pb2.FromDecode]] = {}
        to_decode: dict[str, list[kv_pb2.FromPrefill]] = {}
        for effect in effects:
            match effect:
                case ToPrefill(peer, message):
                    to_prefill.setdefault(peer, []).append(message)
                case ToDecode(peer, message):
                    to_decode.setdefault(peer, []).append(message)
                case Pull():
                    self._pullers.pull(effect)
                case CancelPull(order_id):
                    self._pullers.cancel(order_id)
                case Digest():
                    self._pullers.digest(effect)
                case Redial(peer):
                    self._redial(peer)
        if to_prefill or to_decode:
            self._streams.send(to_prefill, to_decode)

    def dial(self, peer: str, endpoint: str) -> None:
        """Make a link, unless there is one."""
        if peer not in self._endpoints:
            self._endpoints[peer] = endpoint
            self._streams.dial(peer, endpoint)

    def has_link(self, peer: str) -> bool:
        """Whether there is a link that was not hung up."""
        return peer in self._endpoints

    def connected(self, peer: str) -> None:
        """The handshake is done."""
        self._connected.add(peer)

    def disconnected(self, peer: str) -> None:
        """The stream broke; the link makes it anew."""
        self._connected.discard(peer)
        self._decode.on_disconnected(peer)

    def hang_up(self, peer: str) -> None:
        """End the link, if there is one."""
        if self._endpoints.pop(peer, None) is not None:
            self._connected.discard(peer)
            self._streams.hang_up(peer)
            self._pullers.forget(peer)

    def hang_up_needless(self) -> None:
        """End the links that are not connected and have nothing to say."""
        for peer in [p for p in self._endpoints if p not in self._connected]:
            if not self._decode.needs(peer):
                self.hang_up(peer)

    def _redial(self, peer: str) -> None:
        if peer in self._endpoints:
            self.disconnected(peer)
            self._streams.hang_up(peer)
            self._streams.dial(peer, self._endpoints[peer])
