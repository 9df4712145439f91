"""Receives blocks of a peer by TCP, straight into our memory.

A peer has `CONNECTIONS` connections, each with a thread that receives: one core moves fewer bytes
than two. A read is cut into a part for each, unless it is small. Of a connection's parts all are
asked for at once, and they arrive in the same order:

    post ─▶ request ─▶ connection 0 ─▶ source          parts ─▶ thread: recvmsg into the pool
                       connection 1 ─▶ source          parts ─▶ thread: …

The thread of a connection is the only one that writes to our blocks. When a connection fails the
peer fails: its other connections are shut down, and what was asked of them ends too. `ask` and
`end` are called by the transfer thread.
"""

from __future__ import annotations

import contextlib
import hmac
import queue
import socket
import threading
from collections.abc import Callable, Iterator, Sequence

from tasuki.kv import greeting
from tasuki.kv.reaching import start
from tasuki.kv.tcp_socket import MAX_BUFFERS, request, tune, without
from tasuki.kv.transport import TransportError

STALL_S = 10.0  # that no byte comes of what was asked for
CONNECTIONS = 2
_SMALL_BYTES = 512 << 10  # less is not cut
_REQUEST_BUFFER_BYTES = 512 << 10  # so that requests never wait for a source that is stopped

Row = tuple[int, int, int]  # address here, address there, bytes


class Part:
    """What is asked of one connection: `rows` (address there, bytes), into `buffers`."""

    def __init__(self, rows: list[tuple[int, int]], buffers: list[memoryview]) -> None:
        self.rows, self.buffers = rows, buffers
        self.error = ""
        self.ended = False  # set last, by the connection's thread


class TcpRead:
    """A read under way; made by `TcpPeer.read`."""

    def __init__(self, parts: list[Part]) -> None:
        self._parts = parts

    def done(self) -> bool:
        """Whether all bytes arrived.

        Raises:
            TransportError: It failed, and writes to our blocks no more.
        """
        if not all(part.ended for part in self._parts):
            return False
        for part in self._parts:
            if part.error:
                raise TransportError(part.error)
        return True


class TcpPeer:
    """The connections to a source.

    Args:
        peer: For messages.
        place: Its address and port.
        key: Of the source.

    Raises:
        TransportError: It is not there, does not answer, or one does not trust the other.
    """

    def __init__(self, peer: str, place: tuple[str, int], key: bytes) -> None:
        self._peer = peer
        self._error = ""  # the first one; nothing is received any more
        self._turn = 0
        self._connections: list[_Connection] = []
        try:
            for _ in range(CONNECTIONS):
                connection = _connect(peer, place, key)
                self._connections.append(_Connection(peer, connection, self._fail))
        except TransportError:
            self.end()
            raise

    def read(self, rows: Sequence[Row], memory: memoryview, address: int) -> TcpRead:
        """Begin to read rows into `memory`, which begins at `address`.

        Raises:
            TransportError: The peer is not there.
        """
        if self._error:
            raise TransportError(self._error)
        parts = []
        shares = len(self._connections) if sum(row[2] for row in rows) >= _SMALL_BYTES else 1
        for share in _cut(rows, shares):
            buffers = [memory[here - address :][:size] for here, _, size in share]
            part = Part([(there, size) for _, there, size in share], buffers)
            self._turn = (self._turn + 1) % len(self._connections)
            self._connections[self._turn].ask(part)
            parts.append(part)
        return TcpRead(parts)

    def end(self) -> None:
        """Leave the peer; nothing is under way."""
        for connection in self._connections:
            connection.end()

    def _fail(self, error: str) -> str:
        """Have all that is under way end; the error that came first. Any thread."""
        self._error = self._error or error
        for connection in self._connections:
            connection.shut_down()
        return self._error


class _Connection:
    """A connection after its greeting, and the thread that receives by it."""

    def __init__(self, peer: str, connection: socket.socket, fail: Callable[[str], str]) -> None:
        self._peer, self._socket, self._fail = peer, connection, fail
        self._parts: queue.SimpleQueue[Part | None] = queue.SimpleQueue()
        self._broken = ""
        thread = threading.Thread(target=self._run, name="kv-tcp-receiver", daemon=True)
        try:
            start(thread, peer)
        except TransportError:
            connection.close()
            raise

    def ask(self, part: Part) -> None:
        """Ask for a part, which ends in any case."""
        self._parts.put(part)
        try:
            self._socket.sendall(request(part.rows))
        except OSError as error:
            self._fail(_told(self._peer, error))

    def shut_down(self) -> None:
        """Have the parts that were asked for end."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def end(self) -> None:
        """End the thread, once nothing is under way."""
        self._parts.put(None)

    def _run(self) -> None:
        with self._socket:
            while (part := self._parts.get()) is not None:
                if not self._broken:
                    try:
                        self._receive(part.buffers)
                    except OSError as error:
                        self._broken = self._fail(_told(self._peer, error))
                part.error, part.buffers = self._broken, []
                part.ended = True

    def _receive(self, buffers: list[memoryview]) -> None:
        for first in range(0, len(buffers), MAX_BUFFERS):
            left = buffers[first : first + MAX_BUFFERS]
            while left:
                got = self._socket.recvmsg_into(left, 0, socket.MSG_WAITALL)[0]
                if not got:
                    raise ConnectionResetError("it closed the connection")
                left = without(left, got)


def _connect(peer: str, place: tuple[str, int], key: bytes) -> socket.socket:
    """A connection to a source, after the greeting.

    Raises:
        TransportError: See `TcpPeer`.
    """
    connection: socket.socket | None = None
    at = f"{peer} at {place[0]} port {place[1]}"
    try:
        connection = socket.create_connection(place, timeout=greeting.GREETING_S)
        expected = greeting.introduce(connection, key)
        reply = greeting.message(connection, len(expected))
        if trusted := hmac.compare_digest(reply, expected):  # another may hang up at once
            tune(connection, STALL_S)
            size = _REQUEST_BUFFER_BYTES
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size)
    except (OSError, ValueError, OverflowError) as error:  # it may have told what is no address
        if connection is not None:
            connection.close()
        if isinstance(error, TimeoutError):
            limit_s = greeting.GREETING_S
            raise TransportError(f"{at} does not answer within {limit_s:g} s") from None
        raise TransportError(f"{at} cannot be reached: {error}") from error
    if not trusted:
        connection.close()
        if not reply:
            raise TransportError(
                f"{at} closed the connection: it has ended, or is another process by now"
            )
        raise TransportError(f"{at} has another key: it is another process by now")
    return connection


def _told(peer: str, error: OSError) -> str:
    """A failure of a connection, for people."""
    if isinstance(error, BlockingIOError):
        return f"{peer} has sent nothing for {STALL_S:g} s"
    return f"{peer} has ended: {error}"


def _cut(rows: Sequence[Row], shares: int) -> Iterator[list[Row]]:
    """Cut rows into shares of as many bytes each, in order; the last may be smaller."""
    most = -(-sum(size for _, _, size in rows) // shares)
    share: list[Row] = []
    room = most
    for here, there, size in rows:
        begin = 0
        while begin < size:
            piece = min(room, size - begin)
            share.append((here + begin, there + begin, piece))
            begin, room = begin + piece, room - piece
            if not room:
                yield share
                share, room = [], most
    if share:
        yield share
