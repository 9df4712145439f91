"""A TCP relay in front of a worker, whose connections a test can break.

The router reaches the worker through it. Other workers reach the worker directly.
All relays of a process run on one thread with an event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import struct
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
_AT_ONCE_BYTES = 1 << 16


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="relays", daemon=True).start()
    return loop


def _call(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run_coroutine_threadsafe(work, _loop()).result(30)


def reset(writer: asyncio.StreamWriter) -> None:
    """Closes a connection with RST, and drops what is not sent."""
    connection = writer.get_extra_info("socket")
    if connection is not None:
        with contextlib.suppress(OSError):
            linger = struct.pack("ii", 1, 0)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.transport.abort()


class Relay:
    """Passes bytes on between whoever connects and one port of this machine.

    Args:
        to: the port.
    """

    def __init__(self, to: int) -> None:
        self._to = to
        self._open: set[asyncio.StreamWriter] = set()
        self._passes = asyncio.Event()
        self._passes.set()
        self._server = _call(asyncio.start_server(self._accept, "127.0.0.1", 0))
        self.port: int = self._server.sockets[0].getsockname()[1]

    def reset(self) -> int:
        """Resets every connection; returns how many there were."""
        return _call(self._reset())

    def vanish(self) -> None:
        """From now on nothing passes and no connection ends, as if a machine were gone."""
        _call(self._set(False))

    def come_back(self) -> None:
        """Connections of before are reset, new ones are passed on again."""
        _call(self._reset())
        _call(self._set(True))

    def close(self) -> None:
        """Resets what is open and listens no more."""
        _call(self._close())

    async def _set(self, passes: bool) -> None:
        if passes:
            self._passes.set()
        else:
            self._passes.clear()

    async def _reset(self) -> int:
        connections = list(self._open)
        for writer in connections:
            reset(writer)
        return len(connections) // 2

    async def _close(self) -> None:
        self._server.close()
        await self._reset()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            await self._passes.wait()
            to_worker = await asyncio.open_connection("127.0.0.1", self._to)
        except OSError:
            self._open.discard(writer)
            reset(writer)
            return
        self._open.add(to_worker[1])
        try:
            await asyncio.gather(
                self._pass_on(reader, to_worker[1]), self._pass_on(to_worker[0], writer)
            )
        except OSError:
            pass
        finally:
            for each in (writer, to_worker[1]):
                self._open.discard(each)
                reset(each)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(_AT_ONCE_BYTES):
            await self._passes.wait()
            writer.write(data)
            await writer.drain()
        await self._passes.wait()
        raise ConnectionResetError("one side has closed")
