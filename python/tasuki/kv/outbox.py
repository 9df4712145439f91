"""What waits to be written to a stream, taken out all at once.

A write takes several turns of the event loop, and so of the interpreter, which the
engine thread keeps busy: what comes meanwhile goes out together with the next one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


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
