"""Keeps listening sockets that a library opened on all addresses to the one that is wanted.

A socket that listens cannot be bound again. The kernel runs a filter on every packet that comes
to it instead, and this filter drops those to other addresses. Connections inherit it.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator

import psutil

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_SO_ATTACH_FILTER = 26
# Classic BPF (linux/filter.h): offsets from here on count from the packet's IP header.
_NETWORK = 0xFFF00000
_LOAD_BYTE, _LOAD_WORD, _SHIFT_RIGHT, _IF_EQUAL, _RETURN = 0x30, 0x20, 0x74, 0x15, 0x06
_DESTINATION = {4: 16, 6: 24}  # its offset in the IP header, by version
_Step = tuple[int, int, int, int]  # code, steps to skip if true and if false, operand


@contextlib.contextmanager
def only_to(address: Address) -> Iterator[None]:
    """Sockets that begin to listen in the block accept packets to `address` alone.

    Raises:
        OSError: The kernel takes no filter.
    """
    before = set(_listening())
    yield
    for descriptor in _listening():
        if descriptor not in before:
            _attach(descriptor, _filter(address))


def _listening() -> list[int]:
    connections = psutil.Process().net_connections(kind="tcp")
    return [each.fd for each in connections if each.status == psutil.CONN_LISTEN]


def _filter(address: Address) -> list[_Step]:
    """Accepts packets of this version to this address, drops all others."""
    words = struct.unpack(f"!{len(address.packed) // 4}I", address.packed)
    first = _NETWORK + _DESTINATION[address.version]
    steps: list[_Step] = [
        (_LOAD_BYTE, 0, 0, _NETWORK),
        (_SHIFT_RIGHT, 0, 0, 4),
        (_IF_EQUAL, 0, 2 * len(words) + 1, address.version),
    ]
    for index, word in enumerate(words):
        to_drop = 2 * (len(words) - 1 - index) + 1
        steps += [
            (_LOAD_WORD, 0, 0, first + 4 * index),
            (_IF_EQUAL, 0, to_drop, word),
        ]
    return [*steps, (_RETURN, 0, 0, 0xFFFFFFFF), (_RETURN, 0, 0, 0)]


def _attach(descriptor: int, steps: list[_Step]) -> None:
    program = b"".join(struct.pack("=HBBI", *step) for step in steps)
    memory = ctypes.create_string_buffer(program, len(program))
    option = struct.pack("@HP", len(steps), ctypes.addressof(memory))
    with socket.socket(fileno=os.dup(descriptor)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, option)
