"""Carries out the effects of the two state machines, by streams and transfer threads.

    engine thread, loop's thread ──▶ Carrier ─┬─▶ Streams ──▶ link.py      messages, in the loop
                                              └─▶ ranked.py ──▶ puller.py  pulls and digests

`Carrier` keeps the links to prefill engines, under the lock of `handoff.py`, which tells it what
concerns them. `Streams` has the streams with peers, of either side, and may be called from any
thread: each call is done in the asyncio loop's thread, in order. `link.py` has the streams
themselves.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

from tasuki import background
from tasuki.kv.decode_side import DecodeSide
from tasuki.kv.effects import CancelPull, Digest, Effect, Pull, Redial, ToDecode, ToPrefill
from tasuki.kv.fleet import Fleet
from tasuki.kv.identity import PROTOCOL_VERSION
from tasuki.kv.link import DialledLink, HandoffServicer, OnEvent
from tasuki.kv.ranked import RankedPuller
from tasuki.v1 import kv_pb2

log = logging.getLogger(__name__)


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


class Streams:
    """Streams dialled to prefill engines, and served to decode engines.

    Args:
        loop: where they run; may not be running yet.
        identity: of the model (16 bytes); peers must have the same.
        engine_id: new at every start.
        make_reply: answers the handshake of a decode engine.
        digests: asked for of prefill engines; None: none.
        on_event: what comes over any stream, in the loop's thread.
        fleet: certificates for streams that are dialled; None: they are plain.

    Attributes:
        servicer: serves the streams of decode engines.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        identity: bytes,
        engine_id: str,
        make_reply: Callable[[], kv_pb2.HelloReply],
        on_event: OnEvent,
        fleet: Fleet | None = None,
        digests: kv_pb2.DigestRequest | None = None,
    ) -> None:
        self._loop = loop
        self._digests = digests
        self._identity = identity
        self._engine_id = engine_id
        self._on_event = on_event
        self._fleet = fleet
        self._links: dict[str, DialledLink] = {}  # loop's thread only
        self._closed = False
        self.servicer = HandoffServicer(identity, engine_id, make_reply, on_event, PROTOCOL_VERSION)

    def in_loop(self, function: Callable[..., None], *args: object) -> None:
        """Call a function in the loop's thread, after what was called before."""
        try:
            background.call(self._loop, function, *args)
        except RuntimeError:  # the loop is closed: the process is ending
            log.debug("%s after the loop's end", function.__name__)

    def send(
        self,
        to_prefill: Mapping[str, Sequence[kv_pb2.FromDecode]],
        to_decode: Mapping[str, Sequence[kv_pb2.FromPrefill]],
    ) -> None:
        """Send messages, by peer; they are lost where there is no stream."""
        self.in_loop(self._send, to_prefill, to_decode)

    def dial(self, peer: str, endpoint: str) -> None:
        """Keep a stream to a prefill engine, made again when it breaks."""
        self.in_loop(self._dial, peer, endpoint)

    def hang_up(self, peer: str) -> None:
        """End the stream to a prefill engine."""
        self.in_loop(self._hang_up, peer)

    def close(self) -> None:
        """End all streams, for good."""
        self._closed = True
        self.in_loop(self._close)

    # In the loop's thread.

    def _send(
        self,
        to_prefill: Mapping[str, Sequence[kv_pb2.FromDecode]],
        to_decode: Mapping[str, Sequence[kv_pb2.FromPrefill]],
    ) -> None:
        for peer, messages in to_prefill.items():
            if (link := self._links.get(peer)) is not None:
                link.send(messages)
        for peer, replies in to_decode.items():
            self.servicer.send(peer, replies)

    def _dial(self, peer: str, endpoint: str) -> None:
        if self._closed:
            return
        hello = kv_pb2.Hello(
            protocol_version=PROTOCOL_VERSION,
            identity=self._identity,
            engine_id=self._engine_id,
            expected_engine_id=peer,
            digests=self._digests,
        )
        self._links[peer] = DialledLink(peer, endpoint, hello, self._on_event, fleet=self._fleet)

    def _hang_up(self, peer: str) -> None:
        link = self._links.pop(peer, None)
        if link is not None:
            link.close()

    def _close(self) -> None:
        for peer in list(self._links):
            self._hang_up(peer)
        self.servicer.close()
