"""The worker's gRPC face: router streams in, step reports out. Asyncio thread."""

from __future__ import annotations

import asyncio
import logging
import queue
import time
from collections.abc import AsyncIterator, Callable

import grpc

from tasuki import background
from tasuki.engine.api import Leg
from tasuki.kv.fleet import refuse_strangers
from tasuki.kv.grpc_streams import (
    STREAM_BROKE,
    UnreadableMessageError,
    keepalive_options,
    readable,
    refuse_unreadable,
)
from tasuki.v1 import worker_pb2 as pb
from tasuki.v1.worker_pb2_grpc import WorkerServicer
from tasuki.worker.convert import (
    RefusedMessageError,
    failed_leg,
    grammar_from_wire,
    peer_from_wire,
    request_from_wire,
)
from tasuki.worker.loop import (
    HEARTBEAT_S,
    Aborted,
    Closed,
    Command,
    Flushed,
    Opened,
    Resynced,
    Retargeted,
    RoleSet,
    Submitted,
)
from tasuki.worker.sessions import MESSAGE_BYTES, Session

log = logging.getLogger(__name__)

# Routers and decode workers ping idle streams to notice a frozen machine; gRPC's
# default would call that abuse and hang up. And so do we.
SERVER_OPTIONS = (
    *keepalive_options(),
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),
)


class WorkerService(WorkerServicer):
    """`tasuki.v1.Worker`: every stream becomes a session of the engine thread.

    Args:
        inbox: Of the engine thread.
        late: Whether the engine thread takes longer than its step should.
        quiet_s: After so long without its reports, an empty one is sent: it is in a long
            step. Not while it is `late`: routers then notice the silence.
    """

    def __init__(
        self,
        inbox: queue.SimpleQueue[Command],
        late: Callable[[], bool],
        quiet_s: float = 1.5 * HEARTBEAT_S,
    ) -> None:
        self._inbox = inbox
        self._late = late
        self._quiet_s = quiet_s

    async def Serve(  # noqa: N802 - gRPC names it
        self,
        request_iterator: AsyncIterator[pb.RouterMessage],
        context: grpc.aio.ServicerContext[pb.RouterMessage, pb.WorkerMessage],
    ) -> AsyncIterator[pb.WorkerMessage]:
        """One router's stream, until either side ends it."""
        await refuse_strangers(context)
        session = Session(asyncio.get_running_loop())
        self._inbox.put(Opened(session))
        reading = self._read(session, readable(request_iterator, "a router"))
        expected = (*STREAM_BROKE, UnreadableMessageError)
        reader = background.start(reading, "router", *expected)
        reader.add_done_callback(lambda _: session.queue.put_nowait(None))
        quiet_s: float | None = None  # the worker's information comes first, however late
        try:
            while True:
                try:
                    async with asyncio.timeout(quiet_s):
                        message = await session.queue.get()
                    quiet_s = self._quiet_s
                except TimeoutError:
                    if self._late():
                        continue
                    message = pb.WorkerMessage(step=pb.StepReport())
                if message is None:
                    await refuse_unreadable(context, reader)
                    return
                yield message
        finally:
            reader.cancel()
            self._inbox.put(Closed(session))

    async def _read(self, session: Session, messages: AsyncIterator[pb.RouterMessage]) -> None:
        async for message in messages:
            try:
                command = _command(session, message)
            except RefusedMessageError as error:
                request_id = getattr(message, message.WhichOneof("message") or "").request_id
                session.send(failed_leg(request_id, str(error)))
                self._inbox.put(Aborted(session, request_id, ()))  # its router has given it up
                continue
            if command is not None:
                self._inbox.put(command)


def _command(session: Session, message: pb.RouterMessage) -> Command | None:
    match message.WhichOneof("message"):
        case "submit":
            submit, engine_id, endpoint = message.submit, "", ""
            spec = request_from_wire(submit)
            if spec.leg is not Leg.COLOCATED:
                engine_id, endpoint = peer_from_wire(submit.request_id, submit.peer)
            return Submitted(
                session,
                spec,
                engine_id,
                endpoint,
                time.monotonic(),
                submit.number,
                grammar_from_wire(submit),
            )
        case "abort":
            return Aborted(session, message.abort.request_id, tuple(message.abort.choices))
        case "retarget":
            request_id = message.retarget.request_id
            peer = peer_from_wire(request_id, message.retarget.peer)
            return Retargeted(session, request_id, *peer)
        case "set_role":
            return RoleSet(session, message.set_role)
        case "resync_kv":
            return Resynced(session)
        case "flush_cache":
            return Flushed()
        case unknown:
            log.warning("a router sent a message that this version does not know: %s", unknown)
            return None
