"""How a reader of a worker's KV pool and the worker prove to each other that both have its key.

    reader                              source
      ── connect ─────────────────────▶
      ◀───────────────────── nonce ────
      ── nonce, HMAC of both ─────────▶   has the key?
      ◀── HMAC of both, … ─────────────   has the key?

The key is random, made at each start, and part of the metadata that workers tell each other (by
mTLS with --fleet-cert). So a reader also notices that another process has the address by now. No
key is sent over the connection. Nothing that follows the greeting is encrypted or authenticated.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator

log = logging.getLogger(__name__)

KEY_BYTES = 32
NONCE_BYTES = 16
PROOF_BYTES = 32
GREETING_S = 5.0  # for each message of a greeting
_PAUSE_S = 0.1  # after a connection that could not be accepted

_READER, _SOURCE = b"reader", b"source"


def new_key() -> bytes:
    """A key of a worker, `KEY_BYTES`."""
    return secrets.token_bytes(KEY_BYTES)


def readers(listener: socket.socket) -> Iterator[socket.socket]:
    """Connections as they come, without end; why none can be accepted is told in the log, once."""
    said = ""
    while True:
        try:
            reader, _ = listener.accept()
        except OSError as error:  # of this connection, or no descriptor is left
            if str(error) != said:
                said = str(error)
                log.warning("a reader of KV cannot be accepted: %s", error)
            time.sleep(_PAUSE_S)
            continue
        said = ""
        yield reader


def begin(reader: socket.socket, serve: Callable[[socket.socket], None], name: str) -> bool:
    """Serve a reader on a thread of its own. False: the system gives none; the reader is closed."""
    try:
        threading.Thread(target=serve, args=(reader,), name=name, daemon=True).start()
    except RuntimeError as error:
        log.warning("a reader of KV cannot be served: %s", error)
        reader.close()
        return False
    return True


def admit(reader: socket.socket, key: bytes) -> bytes:
    """Find out whether a reader has the key; the source's part.

    Returns:
        The proof that the reader expects next, `PROOF_BYTES`; empty: it does not have the key.

    Raises:
        OSError: The connection ended, or nothing came for `GREETING_S`.
    """
    reader.settimeout(GREETING_S)
    ours = secrets.token_bytes(NONCE_BYTES)
    reader.sendall(ours)
    answer = message(reader, NONCE_BYTES + PROOF_BYTES)
    theirs, proof = answer[:NONCE_BYTES], answer[NONCE_BYTES:]
    if not hmac.compare_digest(proof, _proof(key, _READER, ours, theirs)):
        return b""
    return _proof(key, _SOURCE, ours, theirs)


def introduce(source: socket.socket, key: bytes) -> bytes:
    """Prove to a source that we have its key; the reader's part.

    Returns:
        The proof that the source must send next, `PROOF_BYTES`.

    Raises:
        OSError: The connection ended, or nothing came for `GREETING_S`.
    """
    source.settimeout(GREETING_S)
    theirs = message(source, NONCE_BYTES)
    ours = secrets.token_bytes(NONCE_BYTES)
    source.sendall(ours + _proof(key, _READER, theirs, ours))
    return _proof(key, _SOURCE, theirs, ours)


def message(connection: socket.socket, size_bytes: int) -> bytes:
    """A message of the greeting; shorter if the connection ends before.

    Raises:
        OSError: The connection broke, or nothing came within its timeout.
    """
    got = piece = connection.recv(size_bytes)
    while connection.type == socket.SOCK_STREAM and piece and len(got) < size_bytes:
        piece = connection.recv(size_bytes - len(got))
        got += piece
    return got


def _proof(key: bytes, side: bytes, source_nonce: bytes, reader_nonce: bytes) -> bytes:
    return hmac.digest(key, side + source_nonce + reader_nonce, "sha256")
