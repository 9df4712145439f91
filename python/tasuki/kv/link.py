"""Streams of handoff messages: dialled by the decode worker, served by the prefill worker.

Everything here runs in the asyncio loop. Messages go out by `send`, which any
thread may call; what comes in is given to a callback as `LinkEvent`, in the
loop's thread. A message may get lost with its stream: the state machines are
made for that, so nothing is kept for a stream that is down. All that waits goes
out as one message (`grpc_streams.py`).

    engine thread ──send──▶ outbox ──▶ stream ──▶ peer
    engine thread ◀─inbox── event  ◀── stream ◀── peer
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from tasuki import background
from tasuki.kv.fleet import REMEDY, Fleet, refuse_strangers
from tasuki.kv.grpc_streams import (
    KEEPALIVE_S,
    STREAM_BROKE,
    Outbox,
    UnreadableMessageError,
    keepalive_options,
    readable,
    refuse_unreadable,
)
from tasuki.kv.wire import (
    batch_from_decode,
    batch_from_prefill,
    parts_of,
    reply_flaw,
)
from tasuki.v1 import kv_pb2
from tasuki.v1.kv_pb2_grpc import KvServicer, KvStub

log = logging.getLogger(__name__)

_BACKOFF_MIN_S = 0.05
_BACKOFF_MAX_S = 1.0
_REFUSALS = 3  # in a row, in 0.4 s: an engine listens as long as it lives
_HANDSHAKE_S = 5.0
_CHANNEL_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),  # a new try is a new connection
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
    ("grpc.max_receive_message_length", 64 << 20),  # as servers: all that waits is one message
)


@dataclass(frozen=True, slots=True)
class Connected:
    """The handshake with prefill engine `peer` succeeded."""

    peer: str
    reply: kv_pb2.HelloReply


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The stream to prefill engine `peer` broke, or could not be made."""

    peer: str


@dataclass(frozen=True, slots=True)
class Refused:
    """Prefill engine `peer` is `gone` (nobody or another one answers), or never accepts us."""

    peer: str
    message: str
    gone: bool


@dataclass(frozen=True, slots=True)
class FromPrefillEngine:
    peer: str
    message: kv_pb2.FromPrefill


@dataclass(frozen=True, slots=True)
class FromDecodeEngine:
    peer: str
    message: kv_pb2.FromDecode


@dataclass(frozen=True, slots=True)
class Greeted:
    """Decode engine `peer` has begun (or ended: None) a stream; what digests it asks for."""

    peer: str
    digests: kv_pb2.DigestRequest | None


LinkEvent = Greeted | Connected | Disconnected | Refused | FromPrefillEngine | FromDecodeEngine
OnEvent = Callable[[LinkEvent], None]


class DialledLink:
    """The stream to one prefill engine, made again with backoff until `close`."""

    def __init__(
        self,
        peer: str,
        endpoint: str,
        hello: kv_pb2.Hello,
        on_event: OnEvent,
        keepalive_s: float = KEEPALIVE_S,
        fleet: Fleet | None = None,
    ) -> None:
        self._fleet = fleet
        self._peer = peer
        self._endpoint = endpoint
        self._hello = kv_pb2.FromDecode(hello=hello)
        self._on_event = on_event
        self._options = (*_CHANNEL_OPTIONS, *keepalive_options(keepalive_s))
        self._outbox: Outbox[kv_pb2.FromDecode] | None = None
        self._task = background.start(self._run(), f"kv stream to {peer}")

    def send(self, messages: Sequence[kv_pb2.FromDecode]) -> None:
        """Queue messages for the stream; dropped when there is none."""
        if self._outbox is not None:
            self._outbox.put(messages)

    def close(self) -> None:
        """End the stream for good."""
        self._task.cancel()

    async def _run(self) -> None:
        backoff_s = _BACKOFF_MIN_S
        logged = ""
        refusals = 0
        while True:
            greeted, ended = False, True
            try:
                async with self._channel() as channel:
                    greeted = await self._talk(channel)
                    if self._outbox is None and not greeted:
                        return  # refused
            except UnreadableMessageError as error:
                self._on_event(Refused(self._peer, str(error), gone=False))
                return
            except STREAM_BROKE as error:
                log.debug("kv stream to %s at %s: %s", self._peer, self._endpoint, error)
                ended = False
                why = "" if self._outbox is not None else _misunderstanding(error)
                if why and why != logged:
                    log.warning(
                        "kv stream to %s at %s: %s; %s", self._peer, self._endpoint, why, REMEDY
                    )
                logged = why
                greeted = self._outbox is not None
                refusals = refusals + 1 if _nobody_listens(error) else 0
                if refusals == _REFUSALS:
                    expected = self._hello.hello.expected_engine_id
                    message = f"engine {expected} is gone: nobody listens at {self._endpoint}"
                    self._on_event(Refused(self._peer, message, gone=True))
                    return
            if self._outbox is not None:
                self._outbox = None
                level, how = (logging.INFO, "ended") if ended else (logging.WARNING, "broke")
                log.log(level, "kv stream to %s at %s %s", self._peer, self._endpoint, how)
            self._on_event(Disconnected(self._peer))
            backoff_s = _BACKOFF_MIN_S if greeted else min(backoff_s * 2, _BACKOFF_MAX_S)
            await asyncio.sleep(backoff_s)

    def _channel(self) -> grpc.aio.Channel:
        if self._fleet is None:
            return grpc.aio.insecure_channel(self._endpoint, options=self._options)
        return self._fleet.channel(self._endpoint, self._options)

    async def _talk(self, channel: grpc.aio.Channel) -> bool:
        """One stream, from hello to its end. Returns False when refused."""
        stub: Any = KvStub  # generated without types
        call = stub(channel).Handoff()
        await asyncio.wait_for(call.write(self._hello), _HANDSHAKE_S)
        replies = readable(aiter(call), f"prefill worker {self._peer} at {self._endpoint}")
        first = await asyncio.wait_for(anext(replies, None), _HANDSHAKE_S)
        if first is None or first.WhichOneof("message") != "hello":
            raise OSError("the stream ended before the handshake")
        reply = first.hello
        expected = self._hello.hello.expected_engine_id
        if reply.engine_id != expected:
            message = f"engine {expected} is gone: {reply.engine_id} is at {self._endpoint}"
            self._on_event(Refused(self._peer, message, gone=True))
            return False
        if reply.refusal:
            message = f"{self._endpoint} refused the handshake: {reply.refusal}"
            self._on_event(Refused(self._peer, message, gone=False))
            return False
        if flaw := reply_flaw(reply):
            message = f"the handshake with {self._endpoint} failed: {flaw}"
            self._on_event(Refused(self._peer, message, gone=False))
            return False
        self._outbox = Outbox()
        self._on_event(Connected(self._peer, reply))
        writer = background.start(_write(call, self._outbox), f"kv writer to {self._peer}")
        try:
            async for message in replies:
                for part in parts_of(message):
                    self._on_event(FromPrefillEngine(self._peer, part))
        finally:
            writer.cancel()
        return True


def _nobody_listens(error: BaseException) -> bool:
    """Whether the peer's host is there and refuses the connection: no process has the port."""
    if not isinstance(error, grpc.aio.AioRpcError):
        return False
    said = error.details() or ""
    return error.code() is grpc.StatusCode.UNAVAILABLE and "Connection refused" in said


def _misunderstanding(error: BaseException) -> str:
    """What broke a connection before the handshake, if certificates may be why; else empty."""
    if not isinstance(error, grpc.aio.AioRpcError):
        return ""
    refused = error.code() is grpc.StatusCode.UNAUTHENTICATED
    made = error.code() is grpc.StatusCode.UNAVAILABLE and not _nobody_listens(error)
    return (error.details() or "") if refused or made else ""


async def _write(call: Any, outbox: Outbox[kv_pb2.FromDecode]) -> None:
    async for messages in outbox:
        try:
            await call.write(batch_from_decode(messages))
        except STREAM_BROKE:
            return  # the reader sees it too


class HandoffServicer(KvServicer):
    """The prefill side of the streams.

    Args:
        identity: must equal the decode worker's.
        engine_id: of this engine.
        make_reply: the accepting reply.
        on_event: gets every message.
    """

    def __init__(
        self,
        identity: bytes,
        engine_id: str,
        make_reply: Callable[[], kv_pb2.HelloReply],
        on_event: OnEvent,
        protocol_version: int,
    ) -> None:
        self._identity = identity
        self._engine_id = engine_id
        self._make_reply = make_reply
        self._on_event = on_event
        self._protocol_version = protocol_version
        self._streams: dict[str, Outbox[kv_pb2.FromPrefill]] = {}

    def send(self, peer: str, messages: Sequence[kv_pb2.FromPrefill]) -> None:
        """Queue messages for the stream of decode engine `peer`; dropped when there is none."""
        if (outbox := self._streams.get(peer)) is not None:
            outbox.put(messages)

    def close(self) -> None:
        """End every stream."""
        for outbox in self._streams.values():
            outbox.close()

    def refusal(self, hello: kv_pb2.Hello) -> str:
        """Why this decode worker cannot be served; empty: it can. Both sides show it."""
        if hello.protocol_version != self._protocol_version:
            return (
                f"protocol version is {hello.protocol_version} at the decode worker and"
                f" {self._protocol_version} at the prefill worker: run one version of tasuki"
            )
        if hello.identity != self._identity:
            return (
                f"identity is {hello.identity.hex()} at the decode worker and"
                f" {self._identity.hex()} at the prefill worker: start both with the same model"
                " and dtype"
            )
        if not hello.engine_id:
            return "the decode worker gives no engine id: run one version of tasuki"
        if hello.expected_engine_id != self._engine_id:
            return (
                f"the decode worker looks for engine {hello.expected_engine_id} and this address is"
                f" that of engine {self._engine_id} by now: a request that is placed anew finds it"
            )
        return ""

    async def Handoff(  # noqa: N802
        self,
        request_iterator: AsyncIterator[kv_pb2.FromDecode],
        context: grpc.aio.ServicerContext[kv_pb2.FromDecode, kv_pb2.FromPrefill],
    ) -> AsyncIterator[kv_pb2.FromPrefill]:
        """One decode engine's stream."""
        await refuse_strangers(context)
        messages = readable(request_iterator, "a decode worker")
        try:
            first = await anext(messages, None)
        except UnreadableMessageError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        if first is None or first.WhichOneof("message") != "hello":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message is Hello")
        hello = first.hello
        refusal = self.refusal(hello)
        if refusal:
            log.warning("kv stream of %s refused: %s", hello.engine_id, refusal)
            reply = kv_pb2.HelloReply(engine_id=self._engine_id, refusal=refusal)
            yield kv_pb2.FromPrefill(hello=reply)
            return
        peer = hello.engine_id
        outbox: Outbox[kv_pb2.FromPrefill] = Outbox()
        if (older := self._streams.get(peer)) is not None:
            older.close()
        self._streams[peer] = outbox
        self._on_event(Greeted(peer, hello.digests if hello.HasField("digests") else None))
        reading = self._read(peer, messages, outbox)
        expected = (*STREAM_BROKE, UnreadableMessageError)
        reader = background.start(reading, f"kv stream of {peer}", *expected)
        try:
            yield kv_pb2.FromPrefill(hello=self._make_reply())
            async for replies in outbox:
                yield batch_from_prefill(replies)
            await refuse_unreadable(context, reader)
        finally:
            reader.cancel()
            if self._streams.get(peer) is outbox:
                del self._streams[peer]
                self._on_event(Greeted(peer, None))

    async def _read(
        self,
        peer: str,
        messages: AsyncIterator[kv_pb2.FromDecode],
        outbox: Outbox[kv_pb2.FromPrefill],
    ) -> None:
        try:
            async for message in messages:
                for part in parts_of(message):
                    self._on_event(FromDecodeEngine(peer, part))
        finally:
            outbox.close()
