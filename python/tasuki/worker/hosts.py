"""A worker over several hosts: how the ranks of the others reach the first one.

    first host                                     another host (host_process.py)
    Ranks    ◀── orders, KV: one connection each ── rank r
    Meeting  ◀── alive, told to end ─────────────── its host's process
             ─── the worker serves ───────────────▶
    TCPStore ◀── bytes, through Meeting ◀────────── Relay ◀── torch of rank r

Every connection is made to the first host's port, and each side proves to the other that it
has the key (an HMAC of a random challenge) before anything else is read. Torch's store has no
such proof, so it listens on loopback devices alone, and its bytes go through such connections.
What NCCL and gloo send between ranks is as private as the network between the hosts.

A host that is told to end tells the first one, which drains the worker and then ends it on all.

Threads: one accepts, one for each connection until it is handed over, one for each other host
once the worker serves, two for each relayed connection. A connection that has not proved that it
has the key within `_GREETING_S` ends by a timer, whatever it says. Only `_STRANGERS` of them are
accepted at a time; others wait in the kernel.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import queue
import socket
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

from tasuki.errors import TasukiError
from tasuki.worker.config import KEY_VARIABLE

log = logging.getLogger(__name__)

# What the connection `alive` says: the first host once, then the other one once.
SERVES, END_ORDER = "serves", "end"
_READ_BYTES = 1 << 16
_RETRY_S = 0.5
_MEET_S = 600.0  # for the slowest host to start
# A host that vanishes without a word is noticed after about this time.
_LOST_S = 10
_GREETING_S = 10.0  # until a connection has proved that it has the key
_STRANGERS = 64  # such connections at a time
# Until a first host that has a connection says something. Its kernel keeps 128 strangers before
# ours, of which it hears out 64 in 10 s.
_SILENCE_S = 60.0
# With what the first host's first message begins: its size, and this.
_SIZE_BYTES, _CHALLENGE = 4, b"#CHALLENGE#"
_SHOWN_BYTES = 60  # of what something else says
_TIMEVAL = struct.Struct("ll")  # of the kernel: seconds and microseconds


class HostsError(TasukiError):
    """The hosts of a worker cannot meet."""


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message of a connection.

    Attributes:
        kind: `orders`, `kv`, `alive` or `store`.
        rank: Whose it is; of `alive`, the host's number.
    """

    kind: str
    rank: int


class Meeting:
    """Where the first host takes connections of the others, until `close`.

    Args:
        host: Address to bind.
        port: To bind.
        key: That all hosts have.

    Attributes:
        store_port: Of torch's store here, once there is one.

    Raises:
        HostsError: The address cannot be bound.
    """

    def __init__(self, host: str, port: int, key: bytes) -> None:
        self._key = key
        self.store_port = 0
        self._arrived: dict[Hello, queue.SimpleQueue[Connection]] = defaultdict(queue.SimpleQueue)
        self._lock = threading.Lock()  # guards `_arrived`
        self._strangers = threading.BoundedSemaphore(_STRANGERS)
        self._watched: list[Connection] = []  # a host ends when its connection is closed
        try:
            family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            self._socket = socket.create_server(place, family=family)
        except OSError as error:
            raise HostsError(
                f"cannot listen on {host}:{port} ({error.strerror}): choose another port of the"
                " first of --nodes"
            ) from error
        threading.Thread(target=self._accept, name="meeting", daemon=True).start()

    def await_connection(self, kind: str, rank: int) -> Connection:
        """The connection of this kind and rank, once it is there.

        Raises:
            HostsError: It does not come.
        """
        try:
            return self._queue(Hello(kind, rank)).get(timeout=_MEET_S)
        except queue.Empty:
            raise HostsError(
                f"rank {rank} has not come within {_MEET_S:g} s: start `tasuki worker` with the"
                " same --nodes and key on every host"
            ) from None

    def watch(self, hosts: Iterable[int], on_end_order: Callable[[], object]) -> None:
        """Tell other hosts that the worker serves.

        Args:
            hosts: Their numbers; all have arrived.
            on_end_order: Called from a thread when one of them was told to end.
        """
        for number in hosts:
            host = self.await_connection("alive", number)
            self._watched.append(host)
            threading.Thread(
                target=_hear, args=(host, number, on_end_order), name="host", daemon=True
            ).start()

    def close(self) -> None:
        """Take no more connections."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _queue(self, hello: Hello) -> queue.SimpleQueue[Connection]:
        with self._lock:
            return self._arrived[hello]

    def _accept(self) -> None:
        while True:
            self._strangers.acquire()
            accepted = _next(self._socket)
            if accepted is None:
                return
            try:
                threading.Thread(target=self._greet, args=(accepted,), daemon=True).start()
            except RuntimeError:  # the system has no thread left: the other side tries again
                accepted.close()
                self._strangers.release()

    def _greet(self, accepted: socket.socket) -> None:
        try:
            connection = _connection(accepted)
            hello = self._admitted(connection)
        finally:
            self._strangers.release()
        if hello is None:
            connection.close()  # the one that came says why, in its own log
        elif hello.kind == "store":
            relay(connection, socket.create_connection(("127.0.0.1", self.store_port)))
        else:
            self._queue(hello).put(connection)

    def _admitted(self, connection: Connection) -> Hello | None:
        """What a connection is for, once it has proved that it has the key; None: it has not."""
        deadline_s = time.monotonic() + _GREETING_S
        late = threading.Timer(_GREETING_S, _end, (connection.fileno(),))
        late.daemon = True
        try:
            late.start()
        except RuntimeError:  # the system has no thread left: the other side tries again
            return None
        try:
            deliver_challenge(connection, self._key)
            answer_challenge(connection, self._key)
            hello: Hello = connection.recv()
        except (AuthenticationError, EOFError, OSError):
            return None
        finally:
            late.cancel()
            late.join()  # it must not end another connection with this one's descriptor
        return hello if time.monotonic() < deadline_s else None


def _hear(host: Connection, number: int, on_end_order: Callable[[], object]) -> None:
    with contextlib.suppress(EOFError, OSError):  # its ranks' connections tell of its end
        host.send(SERVES)
        host.recv()
        log.info("host %d was told to end: the worker drains", number)
        on_end_order()


def connect(host: str, port: int, key: bytes, hello: Hello) -> Connection:
    """Connect with the first host; waits until it is there, and tries again if it hangs up.

    Raises:
        HostsError: It is not there in time, has another key, or something else answers.
    """
    deadline_s = time.monotonic() + _MEET_S
    while True:
        try:
            connection = _connection(socket.create_connection((host, port), timeout=_LOST_S))
            stranger = _stranger(connection, time.monotonic() + _SILENCE_S)
            if stranger is None:
                raise HostsError(
                    f"{host}:{port} accepts connections and says nothing within {_SILENCE_S:g} s,"
                    " as another service does: correct the first of --nodes, or choose another port"
                )
            if stranger:
                raise HostsError(
                    f"another service answers at {host}:{port}, with {stranger!r}: correct the"
                    " first of --nodes, or choose another port"
                )
            answer_challenge(connection, key)
            deliver_challenge(connection, key)
            _limit_silence(connection, 0.0)
            connection.send(hello)
            return connection
        except AuthenticationError as error:
            raise HostsError(
                f"{host}:{port} has another key ({error}): give all hosts the same {KEY_VARIABLE}"
            ) from error
        except (EOFError, OSError) as error:
            if time.monotonic() > deadline_s:
                silent = isinstance(error, BlockingIOError)
                reason = "it says nothing" if silent else str(error) or "it hangs up"
                raise HostsError(
                    f"no first host at {host}:{port} within {_MEET_S:g} s ({reason}): start"
                    " `tasuki worker --rank 0` there"
                ) from error
            time.sleep(_RETRY_S)


class Relay:
    """The first host's store, at a port of this host's loopback device.

    Args:
        host, port, key: Of the first host.

    Attributes:
        port: Where torch finds the store.
    """

    def __init__(self, host: str, port: int, key: bytes) -> None:
        self._first = (host, port, key)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, name="relay", daemon=True).start()

    def _accept(self) -> None:
        while (accepted := _next(self._socket)) is not None:
            try:
                relay(connect(*self._first, Hello("store", 0)), accepted)
            except (HostsError, OSError, RuntimeError) as error:  # the next one may be passed on
                log.warning("a connection of torch's store is not passed on: %s", error)
                with contextlib.suppress(OSError):
                    accepted.shutdown(socket.SHUT_RDWR)  # ends a thread that copies already
                accepted.close()


def relay(connection: Connection, plain: socket.socket) -> None:
    """Copy bytes in both directions until one side ends, in two threads."""
    far = socket.socket(fileno=os.dup(connection.fileno()))

    def end() -> None:  # wakes the other thread, too
        for side in (far, plain):
            with contextlib.suppress(OSError):
                side.shutdown(socket.SHUT_RDWR)

    def outward() -> None:
        with contextlib.suppress(OSError):
            while data := plain.recv(_READ_BYTES):
                connection.send_bytes(data)
        end()

    def inward() -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                plain.sendall(connection.recv_bytes())
        end()

    for copy in (outward, inward):
        threading.Thread(target=copy, name="store", daemon=True).start()


def _next(listener: socket.socket) -> socket.socket | None:
    """The next connection; None: `listener` is closed.

    One that was aborted, or for which there is no descriptor, does not end the others' wait.
    """
    told = ""
    while listener.fileno() >= 0:
        try:
            return listener.accept()[0]
        except OSError as error:
            is_closing = error.errno in (errno.EINVAL, errno.EBADF)
            if str(error) != told and not is_closing:
                told = str(error)
                log.warning("a connection of another host cannot be accepted: %s", error)
            time.sleep(_RETRY_S)
    return None


def _connection(made: socket.socket) -> Connection:
    """A connection over a socket, which notices that the other host has vanished."""
    made.settimeout(None)
    for option, value in (
        (socket.TCP_NODELAY, 1),
        (socket.TCP_KEEPIDLE, 2),
        (socket.TCP_KEEPINTVL, 2),
        (socket.TCP_KEEPCNT, 4),
        (socket.TCP_USER_TIMEOUT, 1000 * _LOST_S),
    ):
        made.setsockopt(socket.IPPROTO_TCP, option, value)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return Connection(made.detach())


def _stranger(connection: Connection, deadline_s: float) -> bytes | None:
    """With what something that is no first host begins; empty: it is one, or hangs up.

    Takes nothing of it, and leaves the limit of silence at `_GREETING_S`. Waits until the deadline
    where nothing comes: a first host that many strangers connect to is late. None: nothing came.

    Raises:
        OSError: The connection broke.
    """
    _limit_silence(connection, _GREETING_S)
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        while True:
            try:
                size = _SIZE_BYTES + len(_CHALLENGE)
                begins = same.recv(size, socket.MSG_PEEK | socket.MSG_WAITALL)
                break
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    return None
        if not begins or begins[_SIZE_BYTES:] == _CHALLENGE:
            return b""
        return same.recv(_SHOWN_BYTES, socket.MSG_PEEK | socket.MSG_DONTWAIT)


def _limit_silence(connection: Connection, seconds: float) -> None:
    """Let reading fail when nothing comes for so long; 0: wait without end."""
    limit = _TIMEVAL.pack(int(seconds), int(seconds % 1 * 1e6))
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)


def _end(handle: int) -> None:
    """End a socket's connection, which wakes who reads from it."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(handle)) as same:
        same.shutdown(socket.SHUT_RDWR)


def split_first(node: str) -> tuple[str, int]:
    """Host and port of the first node.

    Raises:
        HostsError: It has no port.
    """
    host, colon, port = node.rpartition(":")
    if not colon or not port.isdigit() or not host:
        raise HostsError(f"the first of --nodes is {node!r}: use HOST:PORT, the others are HOST")
    return host.strip("[]"), int(port)


def nodes_key() -> bytes:
    """The key that the hosts of a worker have in common.

    Raises:
        HostsError: There is none, or it is short.
    """
    key = os.environ.get(KEY_VARIABLE, "")
    if len(key) < 16:
        raise HostsError(
            f"{KEY_VARIABLE} has {len(key)} characters: give all hosts of --nodes the same secret"
            " of at least 16, such as of `openssl rand -hex 32`"
        )
    return key.encode()
