"""What every stream of gRPC needs, of workers with each other and with routers.

- *Outbox*: what waits to be written is taken out all at once. A write takes several turns of the
  event loop, and so of the interpreter, which the engine thread keeps busy: what comes meanwhile
  goes out together with the next one.
- *Unreadable messages*: what comes over a stream and is no message of the contract ends the stream,
  and the worker goes on. Where the next message is read, gRPC's servers raise protobuf's error, and
  its clients give None. A stranger, or a process of another version, must not end a worker with it.
- *Broken streams* and pings that find them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, Generic, TypeVar

import grpc
from google.protobuf.message import DecodeError

from tasuki.errors import TasukiError

T = TypeVar("T")
Message = TypeVar("Message")

# What an operation on a stream raises when the stream is over, on either end.
STREAM_BROKE = (
    grpc.aio.AioRpcError,
    grpc.aio.BaseError,
    asyncio.InvalidStateError,
    OSError,  # TimeoutError too
)
KEEPALIVE_S = 10.0


class Outbox(Generic[T]):
    """The messages of one stream, in order. Loop's thread only."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Sequence[T]] = asyncio.Queue()

    def put(self, messages: Sequence[T]) -> None:
        """Add messages, at least one."""
        self._queue.put_nowait(messages)

    def close(self) -> None:
        """Nothing that comes after this is written."""
        self._queue.put_nowait(())

    async def __aiter__(self) -> AsyncIterator[list[T]]:
        """All that waits, again and again until it is closed."""
        while waiting := list(await self._queue.get()):
            closed = False
            while not closed and not self._queue.empty():
                more = self._queue.get_nowait()
                waiting += more
                closed = not more
            yield waiting
            if closed:
                return


class UnreadableMessageError(TasukiError):
    """The other side of a stream sent bytes that are no message of the contract."""


async def readable(messages: AsyncIterator[Message], sender: str) -> AsyncIterator[Message]:
    """The messages of a stream.

    Args:
        messages: As gRPC reads them.
        sender: Of them, for people.

    Raises:
        UnreadableMessageError: The next one is none.
    """
    try:
        async for message in messages:
            if message is None:
                raise _unreadable(sender, "see the log")
            yield message
    except DecodeError as error:
        raise _unreadable(sender, str(error)) from error


async def refuse_unreadable(
    context: grpc.aio.ServicerContext[Any, Any], reader: asyncio.Task[None]
) -> None:
    """End a served stream with an error if its reader ended by an unreadable message."""
    if not reader.done() or reader.cancelled():
        return
    error = reader.exception()
    if isinstance(error, UnreadableMessageError):
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))


def _unreadable(sender: str, why: str) -> UnreadableMessageError:
    return UnreadableMessageError(
        f"{sender} sent bytes that are no message of this version ({why}):"
        " run the same version of tasuki everywhere"
    )


def keepalive_options(period_s: float = KEEPALIVE_S) -> tuple[tuple[str, int], ...]:
    """What makes either end of a stream notice that the other's machine has vanished.

    Without it a connection that no longer carries anything, and that nobody
    closed, is kept for ever.

    Args:
        period_s: between two pings, and how long an answer is waited for.
    """
    period_ms = round(period_s * 1e3)
    return (
        ("grpc.keepalive_time_ms", period_ms),
        ("grpc.keepalive_timeout_ms", period_ms),
        ("grpc.http2.ping_timeout_ms", period_ms),  # a minute otherwise, whatever the above says
        ("grpc.http2.max_pings_without_data", 0),
    )
