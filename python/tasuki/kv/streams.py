"""The streams of one engine with its peers, of either side, for any thread.

`handoff.py` sends, dials and hangs up from its threads; each call is done in the asyncio
loop's thread, in order. `link.py` has the streams themselves.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence

from tasuki import background
from tasuki.kv.fleet import Fleet
from tasuki.kv.identity import PROTOCOL_VERSION
from tasuki.kv.link import DialledLink, HandoffServicer, OnEvent
from tasuki.v1 import kv_pb2

log = logging.getLogger(__name__)


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
