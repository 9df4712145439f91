"""What comes over a stream and is no message of the contract: the stream ends, the worker goes on.

Where the next message is read, gRPC's servers raise protobuf's error, and its clients give
None. A stranger, or a process of another version, must not end a worker with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError

from tasuki.errors import TasukiError

Message = TypeVar("Message")


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
