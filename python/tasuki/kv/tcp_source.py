"""Sends blocks of our pool to readers that have our key, by TCP from where they lie.

    reader                          source: thread `kv-tcp`, and one for each connection
      ── connect ─────────────────▶
      ◀──────── greeting ─────────▶   has the key? (greeting.py)
      ── rows: address, bytes ────▶   inside of the pool?
      ◀── their bytes ─────────────   scattered in the pool, gathered by the kernel (sendmsg)
      ── the next rows … ─────────▶

A thread has the interpreter for microseconds of a request: the kernel copies without it. A reader
that asks for what is not in the pool, or takes nothing for `STALL_S`, loses its connection.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading

from tasuki.kv import greeting
from tasuki.kv.net_devices import interface_of
from tasuki.kv.tcp_socket import HEADER, MAX_BUFFERS, MAX_ROWS, ROW, tune, without
from tasuki.kv.transport import TransportError

log = logging.getLogger(__name__)

STALL_S = 30.0  # that a reader takes nothing
_BACKLOG = 64
_STRANGERS = 64  # connections that have not proved yet that they have the key


class TcpSource:
    """Serves readers, a thread for each connection, until the process ends.

    Args:
        host: Address that readers connect to. If it is none of this host (it is translated on
            the way), all addresses are bound.
        memory: What may be read, [bytes].
        address: Where it begins, as requests count.

    Attributes:
        port: Where it listens.
        key: What readers must have.

    Raises:
        TransportError: The address cannot be bound.
    """

    def __init__(self, host: str, memory: memoryview, address: int) -> None:
        self.key = greeting.new_key()
        self._memory, self._address = memory, address
        self._strangers = threading.BoundedSemaphore(_STRANGERS)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        own = host if _is_here(host) else ""
        try:
            self._listener = socket.create_server((own, 0), family=family, backlog=_BACKLOG)
        except OSError as error:
            raise TransportError(f"--transport tcp cannot listen on {host}: {error}") from error
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="kv-tcp", daemon=True).start()

    def _accept(self) -> None:
        for reader in greeting.readers(self._listener):
            if not self._strangers.acquire(blocking=False):
                log.warning("%d connections without the key: one more is closed", _STRANGERS)
                reader.close()
                continue
            if not greeting.begin(reader, self._serve, "kv-tcp-reader"):
                self._strangers.release()

    def _serve(self, reader: socket.socket) -> None:
        with reader, contextlib.suppress(OSError):
            try:
                host = reader.getpeername()[0]
                reply = greeting.admit(reader, self.key)
            finally:
                self._strangers.release()
            if not reply:
                log.warning("a process of %s without the key asked for the KV pool", host)
                return
            reader.sendall(reply)
            tune(reader, STALL_S)
            while _asks(reader):
                self._answer(reader, host)

    def _answer(self, reader: socket.socket, host: str) -> None:
        """Answer a request.

        Raises:
            OSError: The reader is gone, takes nothing, or asks for what it cannot have.
        """
        [count] = HEADER.unpack(_received(reader, HEADER.size))
        if count > MAX_ROWS:
            raise _refused(host, f"{count} rows, more than {MAX_ROWS}")
        rows = _received(reader, count * ROW.size)
        buffers = []
        for address, size in ROW.iter_unpack(rows):
            begin = address - self._address
            if begin < 0 or begin + size > len(self._memory):
                raise _refused(host, f"{size} bytes at {address:#x}, outside of the pool")
            buffers.append(self._memory[begin : begin + size])
        for first in range(0, count, MAX_BUFFERS):
            left = buffers[first : first + MAX_BUFFERS]
            while left:
                left = without(left, reader.sendmsg(left))


def _asks(reader: socket.socket) -> bool:
    """Wait for a request, however long it takes. False: the connection has ended."""
    while True:
        try:
            return bool(reader.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            continue


def _received(reader: socket.socket, size_bytes: int) -> bytes:
    """So many bytes of a request.

    Raises:
        OSError: They do not come.
    """
    found = reader.recv(size_bytes, socket.MSG_WAITALL)
    while len(found) < size_bytes:
        piece = reader.recv(size_bytes - len(found), socket.MSG_WAITALL)
        if not piece:
            raise ConnectionResetError
        found += piece
    return found


def _refused(host: str, what: str) -> OSError:
    log.warning("a reader of KV of %s asked for %s: its connection is closed", host, what)
    return ConnectionAbortedError(what)


def _is_here(host: str) -> bool:
    return host.startswith("127.") or interface_of(host.partition("%")[0]) is not None
