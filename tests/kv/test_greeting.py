"""What sources of `--transport shm` and `tcp` have in common."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Callable

import pytest
from support.waiting import until

from tasuki.kv.shm_door import Door, Visit
from tasuki.kv.shm_segment import Segment
from tasuki.kv.tcp_reader import TcpPeer
from tasuki.kv.tcp_source import TcpSource

Opened = tuple[int, str | tuple[str, int], Callable[[], None]]  # family, address, a real visit


def shm() -> Opened:
    door = Door(Segment(4096).descriptor)

    def visit() -> None:
        visit = Visit("source", door.name, door.key)
        os.close(visit.descriptor)
        visit.end()

    return socket.AF_UNIX, f"\0{door.name}", visit


def tcp() -> Opened:
    source = TcpSource("127.0.0.1", memoryview(bytearray(4096)), 0)
    place = ("127.0.0.1", source.port)
    return socket.AF_INET, place, lambda: TcpPeer("source", place, source.key).end()


@pytest.mark.parametrize("opened", [shm, tcp])
def test_a_source_without_a_free_descriptor_serves_later(
    opened: Callable[[], Opened], caplog: pytest.LogCaptureFixture
) -> None:
    family, address, visit = opened()
    kind = socket.SOCK_SEQPACKET if family == socket.AF_UNIX else socket.SOCK_STREAM
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket(family, kind) as reader:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))  # three are open
        try:
            reader.connect(address)
            until(lambda: "cannot be accepted: [Errno 24]" in caplog.text, "the log")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
    visit()
