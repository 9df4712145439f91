"""What sources of `--transport shm` and `tcp` have in common."""

from __future__ import annotations

import errno
import socket
import subprocess
import sys
import threading
from typing import Any

import pytest

from tasuki.kv import greeting
from tasuki.kv.tcp_reader import TcpPeer
from tasuki.kv.tcp_source import TcpSource

_SHM = """
import os
from tasuki.kv.shm_door import Door, Visit
from tasuki.kv.shm_segment import Segment
door = Door(Segment(4096).descriptor)
kind, address = (socket.AF_UNIX, socket.SOCK_SEQPACKET), f"\\0{door.name}"

def visit():
    visit = Visit("source", door.name, door.key)
    os.close(visit.descriptor)
    visit.end()
"""
_TCP = """
from tasuki.kv.tcp_reader import TcpPeer
from tasuki.kv.tcp_source import TcpSource
source = TcpSource("127.0.0.1", memoryview(bytearray(4096)), 0)
kind, address = (socket.AF_INET, socket.SOCK_STREAM), ("127.0.0.1", source.port)

def visit():
    TcpPeer("source", address, source.key).end()
"""
# A process of its own: nothing else is to run out of descriptors. Three are open.
_NO_DESCRIPTOR = """
import io, logging, resource, socket, time
log = io.StringIO()
logging.basicConfig(stream=log)
{}
before = resource.getrlimit(resource.RLIMIT_NOFILE)
reader = socket.socket(*kind)
resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
reader.connect(address)
until = time.monotonic() + 90
while "cannot be accepted: [Errno 24]" not in log.getvalue():
    assert time.monotonic() < until, log.getvalue()
    time.sleep(0.01)
resource.setrlimit(resource.RLIMIT_NOFILE, before)
visit()
print("visited")
"""


@pytest.mark.system
@pytest.mark.parametrize("source", [_SHM, _TCP], ids=["shm", "tcp"])
def test_a_source_without_a_free_descriptor_serves_later(source: str) -> None:
    words = [sys.executable, "-c", _NO_DESCRIPTOR.format(source)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=180)
    assert (done.returncode, done.stdout) == (0, "visited\n"), done.stderr


def test_a_source_without_descriptors_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Readers ask again and again: ten lines a second would fill the disk."""
    monkeypatch.setattr(greeting, "_PAUSE_S", 0.0)
    here, _far = socket.socketpair()
    short, other = OSError(errno.EMFILE, "too many"), OSError(errno.ECONNABORTED, "it left")
    answers = iter([short, short, short, here, short, other, here])

    class Listener:
        def accept(self) -> tuple[socket.socket, str]:
            answer = next(answers)
            if isinstance(answer, OSError):
                raise answer
            return answer, ""

    listener: Any = Listener()
    readers = greeting.readers(listener)
    assert [next(readers), next(readers)] == [here, here]
    said = [record.getMessage().rpartition(" ")[2] for record in caplog.records]
    assert said == ["many", "many", "left"]


def test_where_the_system_gives_no_thread_one_reader_is_turned_away(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source = TcpSource("127.0.0.1", memoryview(bytearray(4096)), 0)
    start = threading.Thread.start
    refused = []

    def scarce(thread: threading.Thread) -> None:
        if thread.name == "kv-tcp-reader" and not refused:
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", scarce)
    address = ("127.0.0.1", source.port)
    with socket.create_connection(address, timeout=30) as first:
        assert first.recv(1) == b"", "it is closed"
    assert refused and "a reader of KV cannot be served: can't start new thread" in caplog.text
    TcpPeer("source", address, source.key).end()
