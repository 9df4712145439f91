"""How the hosts of one worker meet: authenticated, and one hears of the other's end."""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import re
import socket
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest
from support.waiting import free_port

from tasuki.worker import hosts
from tasuki.worker.config import KEY_VARIABLE
from tasuki.worker.hosts import (
    END_ORDER,
    SERVES,
    Hello,
    HostsError,
    Meeting,
    Relay,
    connect,
    nodes_key,
    split_first,
)

KEY = b"a secret of many characters"
HOST = "127.0.0.1"


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def meeting(port: int) -> Iterator[Meeting]:
    made = Meeting(HOST, port, KEY)
    yield made
    made.close()


def meet(meeting: Meeting, port: int, rank: int) -> tuple[Connection, Connection]:
    theirs = connect(HOST, port, KEY, Hello("orders", rank))
    return meeting.await_connection("orders", rank), theirs


def test_each_rank_gets_its_own_connection(meeting: Meeting, port: int) -> None:
    for rank in (2, 1):
        ours, theirs = meet(meeting, port, rank)
        ours.send(("step", rank))
        assert theirs.recv() == ("step", rank)
        theirs.send_bytes(b"done")
        assert ours.recv_bytes() == b"done"


def test_the_first_host_may_have_an_ipv6_address() -> None:
    host, port = split_first(f"[::1]:{free_port()}")
    meeting = Meeting(host, port, KEY)
    try:
        theirs = connect(host, port, KEY, Hello("orders", 1))
        meeting.await_connection("orders", 1).send("step")
        assert theirs.recv() == "step"
    finally:
        meeting.close()


def test_an_end_is_noticed_on_the_other_side(meeting: Meeting, port: int) -> None:
    ours, theirs = meet(meeting, port, 1)
    theirs.close()
    with pytest.raises(EOFError):
        ours.recv()


def test_without_the_key_nothing_is_read(meeting: Meeting, port: int) -> None:
    with pytest.raises(HostsError, match="has another key"):
        connect(HOST, port, b"another secret of many chars", Hello("orders", 1))
    with socket.create_connection((HOST, port)) as stranger:
        stranger.settimeout(30)
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            while stranger.recv(4096):  # a challenge, and the end
                pass
    ours, theirs = meet(meeting, port, 1)  # only the one with the key has arrived
    theirs.send("hello")
    assert ours.recv() == "hello"


def test_connections_that_say_nothing_end_and_are_few_at_a_time(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Counting(Meeting):
        at_once = most = 0
        counts = threading.Lock()

        def _admitted(self, connection: Connection) -> Hello | None:
            with self.counts:
                self.at_once += 1
                self.most = max(self.most, self.at_once)
            try:
                return super()._admitted(connection)
            finally:
                with self.counts:
                    self.at_once -= 1

    monkeypatch.setattr(hosts, "_STRANGERS", 2)
    monkeypatch.setattr(hosts, "_GREETING_S", 1.0)
    meeting = Counting(HOST, port, KEY)
    with contextlib.ExitStack() as held:
        held.callback(meeting.close)
        strangers = [held.enter_context(socket.create_connection((HOST, port))) for _ in range(6)]
        ours, theirs = meet(meeting, port, 1)
        for stranger in strangers:
            stranger.settimeout(10)
            while stranger.recv(4096):  # a challenge, and the end
                pass
        assert meeting.most <= 2
        threading.Timer(1.5, theirs.send, ["late"]).start()
        assert ours.recv() == "late", "with the key it may be silent"


def test_a_stranger_that_says_a_little_now_and_then_holds_no_place(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "_STRANGERS", 1)
    monkeypatch.setattr(hosts, "_GREETING_S", 1.0)
    message = b"\0\0\0\xc8" + bytes(200)
    with contextlib.closing(Meeting(HOST, port, KEY)) as meeting:
        with socket.create_connection((HOST, port)) as stranger:
            stranger.recv(4096)
            for byte in message:
                try:
                    stranger.sendall(bytes([byte]))
                except OSError:
                    break
                threading.Event().wait(0.05)
            else:
                pytest.fail("the whole message was taken")
        ours, theirs = meet(meeting, port, 1)
        theirs.send("here")
        assert ours.recv() == "here"


@pytest.mark.parametrize(
    "said",
    [b"SSH-2.0-OpenSSH_9.2\r\n", b"220\n", bytes(9) + b"\4\0\0" * 5],
    ids=["ssh", "short", "http2"],
)
def test_another_service_at_the_port_is_told_at_once(
    port: int, monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    monkeypatch.setattr(hosts, "_GREETING_S", 0.2)
    with socket.create_server((HOST, port)) as listener:

        def serve() -> None:
            accepted, _ = listener.accept()
            with accepted, contextlib.suppress(OSError):
                accepted.sendall(said)
                accepted.recv(1)

        threading.Thread(target=serve, daemon=True).start()
        says = f"another service answers at {HOST}:{port}, with {said!r}: correct the first of --n"
        with pytest.raises(HostsError, match=re.escape(says)):
            connect(HOST, port, KEY, Hello("orders", 1))


def test_a_port_where_nothing_is_said_is_no_endless_wait(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "_GREETING_S", 0.1)
    monkeypatch.setattr(hosts, "_SILENCE_S", 0.3, raising=False)
    monkeypatch.setattr(hosts, "_MEET_S", 5.0)
    says = r"accepts connections and says nothing within 0\.3 s, .*correct the first of --nodes"
    with socket.create_server((HOST, port)), pytest.raises(HostsError, match=says):
        connect(HOST, port, KEY, Hello("orders", 1))


def test_a_first_host_that_is_late_with_its_challenge_is_waited_for(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has as many strangers as it takes at a time."""
    monkeypatch.setattr(hosts, "_GREETING_S", 0.1)
    accept = hosts._next

    def late(listener: socket.socket) -> socket.socket | None:
        accepted = accept(listener)
        monkeypatch.setattr(hosts, "_GREETING_S", 10.0)
        threading.Event().wait(0.5)
        return accepted

    monkeypatch.setattr(hosts, "_next", late)
    with contextlib.closing(Meeting(HOST, port, KEY)) as meeting:
        ours, theirs = meet(meeting, port, 1)
        theirs.send("here")
        assert ours.recv() == "here"


@pytest.mark.parametrize("number", [errno.ECONNABORTED, errno.EMFILE])
def test_an_accept_that_fails_does_not_end_the_meeting(
    port: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    accept, failed = socket.socket.accept, threading.Event()

    def fail_once(listener: socket.socket) -> tuple[socket.socket, object]:
        if not failed.is_set():
            failed.set()
            raise OSError(number, os.strerror(number))
        return accept(listener)

    monkeypatch.setattr(hosts, "_RETRY_S", 0.01)
    monkeypatch.setattr(hosts, "_MEET_S", 5.0)
    monkeypatch.setattr(socket.socket, "accept", fail_once)
    with contextlib.closing(Meeting(HOST, port, KEY)) as meeting:
        assert failed.wait(10)
        ours, theirs = meet(meeting, port, 1)
        theirs.send("here")
        assert ours.recv() == "here"
    (said,) = [each.getMessage() for each in caplog.records]
    assert "cannot be accepted: " in said and os.strerror(number) in said


def test_a_connection_without_a_thread_is_tried_again(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, failed = threading.Thread.start, []

    def fail_once(thread: threading.Thread) -> None:
        if not failed and "_greet" in thread.name:
            failed.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(hosts, "_RETRY_S", 0.01)
    monkeypatch.setattr(hosts, "_MEET_S", 5.0)
    monkeypatch.setattr(threading.Thread, "start", fail_once)
    with contextlib.closing(Meeting(HOST, port, KEY)) as meeting:
        ours, theirs = meet(meeting, port, 1)
        theirs.send("here")
        assert ours.recv() == "here"
    assert failed


def test_a_first_host_without_the_key_is_refused(port: int) -> None:
    with FakeMeeting(port), pytest.raises(HostsError, match="has another key"):
        connect(HOST, port, KEY, Hello("orders", 1))


class FakeMeeting:
    """Takes any answer to its challenge, and cannot answer one."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_server((HOST, port))
        threading.Thread(target=self._serve, daemon=True).start()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def _serve(self) -> None:
        accepted, _ = self._socket.accept()
        connection = Connection(accepted.detach())
        connection.send_bytes(b"#CHALLENGE#" + bytes(20))
        connection.recv_bytes()
        connection.send_bytes(b"#WELCOME#")
        connection.recv_bytes()
        connection.send_bytes(b"I do not know")
        connection.recv_bytes()


def test_a_host_that_is_told_to_end_tells_the_first_one(meeting: Meeting, port: int) -> None:
    orders: queue.SimpleQueue[str] = queue.SimpleQueue()
    others = [connect(HOST, port, KEY, Hello("alive", number)) for number in (1, 2)]
    meeting.watch((1, 2), lambda: orders.put("end"))
    assert [host.recv() for host in others] == [SERVES, SERVES]
    others[1].send(END_ORDER)
    assert orders.get(timeout=30) == "end"
    assert not others[1].poll(0.05), "its connection stays: a host ends with it"
    others[0].close()  # its ranks tell of that
    others[1].close()
    assert orders.empty()


def test_a_store_is_reached_through_the_meeting(meeting: Meeting, port: int) -> None:
    with socket.create_server((HOST, 0)) as store:
        meeting.store_port = store.getsockname()[1]
        relay = Relay(HOST, port, KEY)
        with socket.create_connection((HOST, relay.port)) as torch:
            accepted, _ = store.accept()
            with accepted:
                torch.sendall(b"set")
                assert accepted.recv(3) == b"set"
                accepted.sendall(b"ok")
                assert torch.recv(2) == b"ok"
            assert torch.recv(1) == b""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    "error", [OSError(errno.EMFILE, "no descriptor"), HostsError("gone"), RuntimeError("no thread")]
)
def test_a_store_connection_that_fails_does_not_end_the_relay(
    meeting: Meeting, port: int, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: object) -> None:
        raise error

    relay, meet_first = Relay(HOST, port, KEY), hosts.connect
    monkeypatch.setattr(hosts, "connect", fail)
    with socket.create_connection((HOST, relay.port), timeout=10) as first:
        assert first.recv(1) == b""
    monkeypatch.setattr(hosts, "connect", meet_first)
    with socket.create_server((HOST, 0)) as store:
        store.settimeout(10)
        meeting.store_port = store.getsockname()[1]
        with socket.create_connection((HOST, relay.port), timeout=10) as second:
            second.sendall(b"a")
            accepted, _ = store.accept()
            with accepted:
                assert accepted.recv(1) == b"a"


def test_settings_are_refused_by_name(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert split_first("10.0.0.1:7100") == ("10.0.0.1", 7100)
    with pytest.raises(HostsError, match="use HOST:PORT"):
        split_first("10.0.0.1")
    monkeypatch.setenv(KEY_VARIABLE, "short")
    with pytest.raises(HostsError, match="has 5 characters"):
        nodes_key()
    with socket.create_server((HOST, port)), pytest.raises(HostsError, match="another port"):
        Meeting(HOST, port, KEY)
