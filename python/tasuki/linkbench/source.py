"""The process whose memory is read, and the small protocol by which a reader finds it.

    reader ── {"ask": "pool", "bytes": n} ──▶ source ── RankPool, its length before it ──▶ reader
    reader ── {"ask": "stream", "bytes": n} ▶ source ── n bytes, as fast as a socket takes them

One line of JSON is one request. The memory holds, in each 8 bytes, their number, so that a
reader can check whatever it reads. Bound to the loopback unless told otherwise: it gives its
memory to everybody who asks.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import socket
import struct
import sys
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch

from tasuki.errors import ERROR_PREFIX, TasukiError
from tasuki.kv.greeting import begin, readers
from tasuki.kv.measure import Blocks
from tasuki.kv.net_devices import Network
from tasuki.launch.parent_death import PARENT_VARIABLE, follow_parent
from tasuki.linkbench.points import LinkbenchError
from tasuki.v1 import kv_pb2

GRANULE = 4096
_LENGTH = struct.Struct("<Q")
_CHUNK = 1 << 20
_BACKLOG = 4


def make_memory(size_bytes: int, device: str, transport: str, host: str) -> Blocks:
    """Registered memory of at least `size_bytes`.

    Raises:
        LinkbenchError: There is none.
        TransportError: The transport does not start, or refuses it.
    """
    try:
        return Blocks(GRANULE, -(-size_bytes // GRANULE), device, transport, Network(host))
    except RuntimeError as error:
        raise LinkbenchError(f"no {size_bytes} bytes of memory on {device}: {error}") from error


def number_words(memory: torch.Tensor) -> None:
    """Write into each 8 bytes of memory their number."""
    words = memory.view(-1).view(torch.int64)
    torch.arange(len(words), dtype=torch.int64, device=words.device, out=words)
    if words.is_cuda:
        torch.cuda.synchronize(words.device)


class Source:
    """Serves readers, one thread each.

    Args:
        host: Address to bind.
        port: 0: a free one.
        device: Where the memory is.
        transport: As in `create_transport`.

    Raises:
        LinkbenchError: The address cannot be bound.
    """

    def __init__(self, host: str, port: int, device: str, transport: str) -> None:
        self._place = (device, transport, host)
        self._blocks: Blocks | None = None
        self._lock = threading.Lock()
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        except OSError as error:
            raise LinkbenchError(
                f"cannot listen on {host}:{port} ({error}): choose another --listen, with an"
                " address of this machine and a free port"
            ) from error
        self.port: int = self._listener.getsockname()[1]

    def serve(self) -> None:
        """Serve until the process ends."""
        for connection in readers(self._listener):
            begin(connection, self._serve, "linkbench")

    def _serve(self, connection: socket.socket) -> None:
        try:
            with contextlib.suppress(OSError):
                self._answer(connection)
        except TasukiError as error:
            print(f"{ERROR_PREFIX}{error}", file=sys.stderr, flush=True)

    def _answer(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as lines:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for line in lines:
                what, size = _asked(line)
                if what == "pool":
                    pool = self._memory(size).pool.SerializeToString()
                    connection.sendall(_LENGTH.pack(len(pool)) + pool)
                else:
                    _stream(connection, size)

    def _memory(self, size_bytes: int) -> Blocks:
        with self._lock:
            if self._blocks is None or self._blocks.memory.numel() < size_bytes:
                self._blocks = make_memory(size_bytes, *self._place)
                number_words(self._blocks.memory)
            return self._blocks


def _asked(line: bytes) -> tuple[str, int]:
    """What is asked for, and of how many bytes.

    Raises:
        LinkbenchError: It is no request of a reader.
    """
    try:
        asked: dict[str, Any] = json.loads(line)
        what, size = asked["ask"], int(asked["bytes"])
        if what not in ("pool", "stream") or size < 1:
            raise ValueError
    except (ValueError, KeyError, TypeError):
        raise LinkbenchError(
            f"a connection that begins with {line[:40]!r} is no reader's: connect with `tasuki"
            " linkbench --peer` of the same version"
        ) from None
    return what, size


def _stream(connection: socket.socket, size_bytes: int) -> None:
    chunk = memoryview(bytearray(_CHUNK))
    left = size_bytes
    while left:
        connection.sendall(chunk[: min(left, _CHUNK)])
        left -= min(left, _CHUNK)


class SourceClient:
    """A reader's connection to a source.

    Args:
        address: host:port, [host]:port for IPv6.

    Raises:
        LinkbenchError: Nobody answers there.
    """

    def __init__(self, address: str, timeout_s: float = 60.0) -> None:
        host, _, port = address.rpartition(":")
        try:
            self._socket = socket.create_connection((host.strip("[]"), int(port)), timeout_s)
        except OSError as error:
            raise LinkbenchError(
                f"no linkbench answers at {address} ({error}): start `tasuki linkbench --listen"
                f" {address}` there"
            ) from error
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def pool(self, size_bytes: int) -> kv_pb2.RankPool:
        """The source's memory, of at least `size_bytes`."""
        self._ask("pool", size_bytes)
        [length] = _LENGTH.unpack(self._receive(bytearray(_LENGTH.size)))
        return kv_pb2.RankPool.FromString(bytes(self._receive(bytearray(length))))

    def stream(self, into: bytearray) -> None:
        """Receive as many bytes as `into` has, over this connection."""
        self._ask("stream", len(into))
        self._receive(into)

    def close(self) -> None:
        """End the connection."""
        self._socket.close()

    def _ask(self, what: str, size_bytes: int) -> None:
        with _connected():
            self._socket.sendall(json.dumps({"ask": what, "bytes": size_bytes}).encode() + b"\n")

    def _receive(self, into: bytearray) -> bytearray:
        view, at = memoryview(into), 0
        while at < len(into):
            with _connected():
                got = self._socket.recv_into(view[at:])
            if not got:
                raise LinkbenchError("the source has ended: its own words say why")
            at += got
        return into


@contextlib.contextmanager
def _connected() -> Iterator[None]:
    """Use a connection to a source.

    Raises:
        LinkbenchError: It broke, or the source is silent.
    """
    try:
        yield
    except OSError as error:
        raise LinkbenchError(
            f"the connection to the source broke ({error}): look at the source's own words, and at"
            " the network between the two"
        ) from error


def be_source(pipe: Connection, device: str, transport: str) -> None:
    """The source of a measurement within one machine: a daemon process of its reader.

    Args:
        pipe: Is told the port, or why there is none.
        device: Where its memory is.
        transport: As in `create_transport`.
    """
    # The process that started this one, which may have ended: `getppid` would say its successor.
    if (reader := multiprocessing.parent_process()) is not None:
        os.environ[PARENT_VARIABLE] = str(reader.pid)
    follow_parent()  # also where a signal ends it, which asks no daemon process to go
    try:
        source = Source("127.0.0.1", 0, device, transport)
    except TasukiError as error:
        pipe.send(str(error))
        return
    pipe.send(source.port)
    source.serve()
