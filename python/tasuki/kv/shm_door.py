"""Gives the descriptor of our segment to readers that may have it, and gets those of peers.

    reader                              source: thread `kv-shm`, and one for each reader
      ── connect ─────────────────────▶   same user? (the kernel says so)
      ◀────────── greeting ───────────▶   has the key? (greeting.py)
      ◀── its last proof, descriptor ──
      ═══ open while it reads ═════════   the end of either is seen by the other

The socket has an abstract name, which is no path and ends with the source. Its name is random,
so a later process never has it. Because of the key no process of another container with the same
user number reads KV.

An abstract name belongs to a network namespace, a user number to a user namespace, and memory
to a host: both processes must have the same of each (`Place`).
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import resource
import secrets
import socket
import struct
import threading
from dataclasses import dataclass

from tasuki.kv import greeting
from tasuki.kv.clock import machine
from tasuki.kv.transport import TransportError

log = logging.getLogger(__name__)

_BACKLOG = 64
_CREDENTIALS = struct.Struct("3i")  # pid, user, group


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process is.

    Attributes:
        host: One boot of one kernel.
        network: Its network namespace.
        users: Its user namespace.
    """

    host: str
    network: str
    users: str

    @classmethod
    def here(cls) -> Place:
        """Of the calling thread, and so of its process."""
        return cls(machine().hex(), _namespace("net"), _namespace("user"))

    def check(self, peer: str, theirs: Place) -> None:
        """Refuse a peer whose memory cannot be mapped from here.

        Raises:
            TransportError: It is elsewhere.
        """
        if theirs.host != self.host:
            raise TransportError(
                f"{peer} is on another host, --transport shm connects workers of one host: put both"
                " on one, or start both with --transport nixl-ucx"
            )
        for kind, ours, its in (
            ("network", self.network, theirs.network),
            ("user", self.users, theirs.users),
        ):
            if ours != its:
                raise TransportError(
                    f"{peer} is in another {kind} namespace of this host ({its}, here {ours}): run"
                    " both in one container or pod, or start both with --transport nixl-ucx"
                )


class Door:
    """Gives a descriptor to every reader of the same user that has the key.

    Args:
        descriptor: To give away.

    Attributes:
        name: Where readers connect, random.
        key: What they must have, `greeting.KEY_BYTES`.

    Raises:
        TransportError: The system has no such sockets.
    """

    def __init__(self, descriptor: int) -> None:
        self.name, self.key = f"tasuki-kv-{secrets.token_hex(16)}", greeting.new_key()
        self._descriptor = descriptor
        try:
            self._listener = _socket()
            self._listener.bind(_address(self.name))
            self._listener.listen(_BACKLOG)
        except OSError as error:
            raise TransportError(f"no Unix socket for shared memory: {error}") from error
        threading.Thread(target=self._accept, name="kv-shm", daemon=True).start()

    def _accept(self) -> None:
        for reader in greeting.readers(self._listener):
            greeting.begin(reader, self._serve, "kv-shm-reader")

    def _serve(self, reader: socket.socket) -> None:
        with reader, contextlib.suppress(OSError):
            if self._greet(reader):
                reader.settimeout(None)
                reader.recv(1)  # until it ends

    def _greet(self, reader: socket.socket) -> bool:
        """Whether a reader may have the descriptor, and got it."""
        if (user := _user_of(reader)) != os.geteuid():
            log.warning("user %d asked for the KV pool of user %d", user, os.geteuid())
            return False
        reply = greeting.admit(reader, self.key)
        if not reply:
            log.warning("a process without the key asked for the KV pool")
            return False
        try:
            socket.send_fds(reader, [reply], [self._descriptor])
        except OSError as error:
            log.warning("the KV pool cannot be given to a reader: %s", error)
            return False
        return True


class Visit:
    """A peer's descriptor, and a connection that says whether the peer lives.

    Args:
        peer: For messages.
        name: Of its door.
        key: Of its door.

    Attributes:
        descriptor: Of its segment.

    Raises:
        TransportError: It is not there, does not answer, or one does not trust the other.
    """

    def __init__(self, peer: str, name: str, key: bytes) -> None:
        self._peer = peer
        try:
            self._connection = _socket()
        except OSError as error:
            raise _no_descriptor(peer) from error
        try:
            self._connection.settimeout(greeting.GREETING_S)
            self._connection.connect(_address(name))
            self.descriptor = self._greet(key)
            self._connection.setblocking(False)
        except TimeoutError:
            self._connection.close()
            limit_s = greeting.GREETING_S
            raise TransportError(f"{peer} does not answer within {limit_s:g} s") from None
        except OSError as error:
            self._connection.close()
            raise TransportError(f"{peer} cannot be reached, it has ended: {error}") from error
        except TransportError:
            self._connection.close()
            raise

    def _greet(self, key: bytes) -> int:
        if (user := _user_of(self._connection)) != os.geteuid():
            raise TransportError(
                f"{self._peer} runs as user {user}, this worker as {os.geteuid()}: start both as"
                " one user, or with --transport nixl-ucx"
            )
        expected = greeting.introduce(self._connection, key)
        reply, descriptors, _, _ = socket.recv_fds(
            self._connection, greeting.PROOF_BYTES, 1, socket.MSG_CMSG_CLOEXEC
        )
        if not reply:
            raise TransportError(
                f"{self._peer} closed the connection: it is another process by now, has ended, or"
                " says in its log why it does not give its KV pool"
            )
        trusted = hmac.compare_digest(reply, expected)
        if trusted and descriptors:
            return descriptors[0]
        if trusted:  # the kernel leaves out what this process cannot have
            raise _no_descriptor(self._peer)
        for descriptor in descriptors:
            os.close(descriptor)
        raise TransportError(f"{self._peer} has another key: it is another process by now")

    def require_alive(self) -> None:
        """Look at the connection.

        Raises:
            TransportError: The peer has ended.
        """
        try:
            self._connection.recv(1)
        except BlockingIOError:
            return
        except OSError:
            pass
        raise TransportError(f"{self._peer} has ended")

    def end(self) -> None:
        """Leave the peer."""
        self._connection.close()


def _no_descriptor(peer: str) -> TransportError:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return TransportError(
        f"no descriptor is left for the KV pool of {peer}: the limit is {limit}, raise it"
        " (ulimit -n)"
    )


def _socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _address(name: str) -> str:
    return f"\0{name}"


def _user_of(connection: socket.socket) -> int:
    """The other side's, as the kernel noted it when it connected or began to listen."""
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(told)
    return int(user)


def _namespace(kind: str) -> str:
    try:
        return os.readlink(f"/proc/thread-self/ns/{kind}")
    except OSError:
        return ""
