"""What both ends of a TCP connection for KV share: its options, a request's form, buffers.

A request is a header with the number of its rows, then rows: address and bytes, in the memory of
the source. Its answer is these bytes, one row after another, and nothing else.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Sequence

HEADER = struct.Struct("<I")
ROW = struct.Struct("<QQ")
MAX_ROWS = 1 << 20  # of a request
MAX_BUFFERS = 1024  # of a call of sendmsg or recvmsg (IOV_MAX of Linux)

_KEEPALIVE = ((socket.TCP_KEEPIDLE, 20), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4))
_LOOPBACK_CONTROL = b"reno"  # every Linux has it, and lets every process use it
_TIME = struct.Struct("@ll")  # struct timeval


def tune(connection: socket.socket, stall_s: float) -> None:
    """Make a connected socket blocking, and ready for large answers.

    Between two hosts congestion control and buffers stay as the system has them. Within a host
    nothing can be congested, but a control that paces, such as BBR, halves the rate.

    Args:
        connection: To tune.
        stall_s: A call that has moved nothing for so long ends with BlockingIOError.
    """
    connection.settimeout(None)
    limit = _TIME.pack(int(stall_s), int(stall_s % 1 * 1e6))
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, limit)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:  # the host of the other may vanish
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    if connection.getsockname()[0] == connection.getpeername()[0]:
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _LOOPBACK_CONTROL)


def request(rows: Sequence[tuple[int, int]]) -> bytes:
    """A request for rows (address, bytes), at most `MAX_ROWS`."""
    return HEADER.pack(len(rows)) + b"".join(ROW.pack(*row) for row in rows)


def without(buffers: list[memoryview], size_bytes: int) -> list[memoryview]:
    """What is left of buffers when their first `size_bytes` are moved."""
    for index, buffer in enumerate(buffers):
        if size_bytes < len(buffer):
            return [buffer[size_bytes:], *buffers[index + 1 :]]
        size_bytes -= len(buffer)
    return []
