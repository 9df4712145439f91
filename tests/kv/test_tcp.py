"""What TCP of our own promises beside what all transports do (`test_transports.py`): for real."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
import torch
from kv_source_process import DEADLINE_S, Source, block_value, fill, layout, sources
from support.namespace import Namespace
from support.waiting import until

from tasuki.kv import greeting, tcp_reader, tcp_source
from tasuki.kv.net_devices import Network
from tasuki.kv.tcp_reader import TcpPeer
from tasuki.kv.tcp_socket import HEADER, ROW, request, without
from tasuki.kv.tcp_source import TcpSource
from tasuki.kv.transfer_plan import Run, make_plans
from tasuki.kv.transport import Transfer, Transport, TransportError, create_transport

pytestmark = pytest.mark.system

BLOCKS, BLOCK_KIB, SEED = 4001, 4, 5
BLOCK_BYTES = BLOCK_KIB * 1024
NEAR, FAR = "10.79.0.1", "10.79.0.2"
Start = Callable[[], Source]


def make(host: str = "127.0.0.1") -> Transport:
    """A transport with a pool of ours."""
    transport = create_transport("tcp", Network(host))
    shape = layout(BLOCKS, BLOCK_KIB)
    transport.register(transport.allocate(shape), shape)
    return transport


@pytest.fixture(scope="module")
def reader() -> Transport:
    return make()


@pytest.fixture
def start(reader: Transport) -> Iterator[Start]:
    with sources(BLOCKS, BLOCK_KIB, SEED, "tcp") as begin:
        yield begin


def connect(reader: Transport, pool: Any, peer: str, **changed: object) -> None:
    [pair] = make_plans([reader.layout], [pool.layout])
    told = json.loads(getattr(pool, "transport_metadata", b"") or pool.metadata) | changed
    reader.connect(peer, json.dumps(told).encode(), pair.plan)


def wait(transfer: Transfer) -> None:
    until(transfer.done, "a read", deadline_s=DEADLINE_S, interval_s=1e-3)


def greet(source: TcpSource, host: str = "127.0.0.1") -> socket.socket:
    """A connection of a reader that has the key."""
    connection = socket.create_connection((host, source.port), timeout=DEADLINE_S)
    expected = greeting.introduce(connection, source.key)
    assert greeting.message(connection, len(expected)) == expected
    connection.settimeout(DEADLINE_S)
    return connection


def _rest(connection: socket.socket) -> int:
    """How many bytes come before the connection ends."""
    size = 0
    try:
        while piece := connection.recv(1 << 20):
            size += len(piece)
    except ConnectionResetError:
        pass
    return size


def test_more_blocks_than_a_call_takes_land_where_they_belong(
    reader: Transport, start: Start
) -> None:
    connect(reader, start().pool, "many")
    fill(reader.pool, 0)
    runs = [Run((i * 29) % BLOCKS, i, 1) for i in range(BLOCKS - 1)]
    wait(reader.post("many", runs))
    wanted = torch.tensor([block_value(run.remote, SEED) for run in runs])
    assert (reader.pool.view(BLOCKS, -1)[:-1] == wanted[:, None]).all()
    assert (reader.pool[-1] == block_value(BLOCKS - 1, 0)).all()
    reader.disconnect("many")


def test_several_reads_are_under_way_at_a_time(reader: Transport, start: Start) -> None:
    connect(reader, start().pool, "source")
    fill(reader.pool, 0)
    half = BLOCKS // 2
    reads = [reader.post("source", [Run(first, first, half)]) for first in (0, half)] + [
        reader.post("source", [Run(i, 2 * half, 1)]) for i in range(9)
    ]
    for read in reads:
        wait(read)
    for block in (0, 1, half - 1, half, 2 * half - 1):
        assert (reader.pool[block] == block_value(block, SEED)).all()
    reader.disconnect("source")


def test_a_stopped_source_does_not_hold_up_the_thread(
    reader: Transport, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(greeting, "GREETING_S", 0.3)
    monkeypatch.setattr(tcp_reader, "STALL_S", 0.3)
    source = start()
    connect(reader, source.pool, "stopped")
    assert source.process.pid is not None
    os.kill(source.process.pid, signal.SIGSTOP)
    fill(reader.pool, 0)
    reads = [reader.post("stopped", [Run(0, 0, BLOCKS)]) for _ in range(2)]
    for read in reads:
        with pytest.raises(TransportError, match=r"stopped has sent nothing for 0\.3 s"):
            wait(read)
    with pytest.raises(TransportError, match=r"sent nothing"):
        reader.post("stopped", [Run(0, 0, 1)])
    with pytest.raises(TransportError, match=r"again at .* does not answer within 0\.3 s"):
        connect(reader, source.pool, "again")
    os.kill(source.process.pid, signal.SIGCONT)
    connect(reader, source.pool, "stopped")  # it is another connection
    wait(reader.post("stopped", [Run(3, 1, 1)]))
    assert (reader.pool[1] == block_value(3, SEED)).all()
    assert (reader.pool[0] == block_value(0, 0)).all(), "nothing is written after the end"
    reader.disconnect("stopped")


def test_a_dead_source_is_said(reader: Transport, start: Start) -> None:
    source = start()
    connect(reader, source.pool, "dead")
    source.kill()
    with pytest.raises(TransportError, match="dead has ended"):
        wait(reader.post("dead", [Run(0, 0, 1)]))
    with pytest.raises(TransportError, match=r"again at 127\.0\.0\.1 port \d+ cannot be reached"):
        connect(reader, source.pool, "again")


def test_nothing_is_left_of_readers(reader: Transport, start: Start) -> None:
    """Whether they disconnect or are killed in the middle of a read."""
    source = start()
    theirs, ours = psutil.Process(source.process.pid), psutil.Process()
    before = [(each.num_fds(), each.num_threads()) for each in (theirs, ours)]
    connect(reader, source.pool, "source")
    wait(reader.post("source", [Run(0, 0, BLOCKS)]))
    reader.disconnect("source")
    context = multiprocessing.get_context("forkserver")
    for _ in range(2):
        begun = context.Event()
        metadata, wire = source.pool.transport_metadata, source.pool.layout.SerializeToString()
        other = context.Process(target=_read_on, args=(metadata, wire, begun), daemon=True)
        other.start()
        assert begun.wait(DEADLINE_S)
        other.kill()
        other.join(DEADLINE_S)
        other.close()
    until(
        lambda: (
            (theirs.num_fds(), theirs.num_threads()) == before[0]
            and ours.num_threads() <= before[1][1]
            and ours.num_fds() <= before[1][0] + 2
        ),  # of the fork server
        lambda: f"{before}, {theirs.num_fds()}, {theirs.num_threads()}, {ours.num_fds()}",
    )
    connect(reader, source.pool, "source")
    wait(reader.post("source", [Run(7, 7, 1)]))
    reader.disconnect("source")


def _read_on(metadata: bytes, wire: bytes, begun: Any) -> None:
    """Read all blocks, again and again."""
    transport = make()
    [pair] = make_plans([transport.layout], [type(transport.layout).FromString(wire)])
    transport.connect("source", metadata, pair.plan)
    while True:
        reads = [transport.post("source", [Run(0, 0, BLOCKS)]) for _ in range(4)]
        begun.set()
        for read in reads:
            wait(read)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"key": "00" * 32}, "far at .* closed the connection: it has ended, or"),
        ({"port": 1}, r"far at 127\.0\.0\.1 port 1 cannot be reached"),
        ({"host": "no.such.invalid"}, r"far at no\.such\.invalid port \d+ cannot be reached"),
        ({"key": "not hexadecimal"}, "far tells of no TCP source"),
        ({"port": None}, "far tells of no TCP source"),
    ],
    ids=str,
)
def test_what_cannot_be_read_is_refused(
    reader: Transport, start: Start, changed: dict[str, object], said: str
) -> None:
    source = start()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(TransportError, match=said):
        connect(reader, source.pool, "far", **changed)
    assert len(os.listdir("/proc/self/fd")) <= before, "nothing stays open"


def test_a_reader_without_the_key_gets_nothing() -> None:
    source = TcpSource("127.0.0.1", memoryview(b"secret"), 0)
    for answer in (b"", b"short", os.urandom(16 + 32) + request([(0, 6)])):
        with socket.create_connection(("127.0.0.1", source.port), DEADLINE_S) as stranger:
            assert len(stranger.recv(64)) == 16
            stranger.sendall(answer)
            with contextlib.suppress(OSError):  # the source may have reset it by now
                stranger.shutdown(socket.SHUT_WR)
            assert not _rest(stranger)
    with greet(source) as friend:
        friend.sendall(request([(1, 5)]))
        assert friend.recv(5, socket.MSG_WAITALL) == b"ecret"


def test_strangers_do_not_fill_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_source, "_STRANGERS", 2)
    monkeypatch.setattr(greeting, "GREETING_S", 0.5)
    source = TcpSource("127.0.0.1", memoryview(b"secret"), 0)
    place = ("127.0.0.1", source.port)
    silent = [socket.create_connection(place, DEADLINE_S) for _ in range(3)]
    assert [len(each.recv(16)) for each in silent] == [16, 16, 0]
    assert [each.recv(16) for each in silent] == [b"", b"", b""], "they said nothing for too long"
    greet(source).close()
    for each in silent:
        each.close()


@pytest.mark.parametrize(
    "asked",
    [
        request([(4096, 8), (4096, 9)]),  # ends behind the pool
        request([(4095, 1)]),
        request([(0, 1)]),
        request([(2**64 - 1, 2**64 - 1)]),
        HEADER.pack(2**32 - 1) + ROW.pack(4096, 1),
    ],
    ids=["long", "before", "null", "wraps", "count"],
)
def test_a_request_for_what_is_not_in_the_pool_ends_the_connection(asked: bytes) -> None:
    source = TcpSource("127.0.0.1", memoryview(b"the pool"), 4096)
    with greet(source) as reader:
        reader.sendall(request([(4096, 3), (4100, 4)]))
        assert reader.recv(7, socket.MSG_WAITALL) == b"thepool"
        reader.sendall(asked)
        assert not _rest(reader)
    with greet(source) as other:
        other.sendall(request([(4097, 2)]))
        assert other.recv(2, socket.MSG_WAITALL) == b"he"


def test_a_reader_that_takes_nothing_loses_its_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tcp_source, "STALL_S", 0.3)
    source = TcpSource("127.0.0.1", memoryview(bytes(64 << 20)), 0)
    before = set(threading.enumerate())
    with greet(source) as reader:
        [thread] = set(threading.enumerate()) - before
        reader.sendall(request([(0, 64 << 20)]))
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
        assert _rest(reader) < 64 << 20


def test_a_source_without_the_key_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process at the address, which sends what it likes and may hang up at any time."""
    monkeypatch.setattr(tcp_reader, "tune", lambda *_: pytest.fail("it was believed"))
    source, other = (TcpSource("127.0.0.1", memoryview(b"pool"), 0) for _ in range(2))
    with pytest.raises(TransportError, match="closed the connection: it has ended, or"):
        TcpPeer("source", ("127.0.0.1", other.port), source.key)
    monkeypatch.setattr(greeting, "admit", lambda reader, _: bytes(16 + 32))
    with pytest.raises(TransportError, match="has another key: it is another process by now"):
        TcpPeer("source", ("127.0.0.1", other.port), source.key)
    monkeypatch.setattr(greeting, "GREETING_S", 0.3)
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(TransportError, match=r"does not answer within 0\.3 s"),
    ):
        TcpPeer("source", ("127.0.0.1", silent.getsockname()[1]), source.key)


def test_blocks_move_by_ipv6() -> None:
    source, reader = make("::1"), make("::1")
    fill(source.pool, SEED)
    connect(reader, source, "six")
    wait(reader.post("six", [Run(9, 2, 1)]))
    assert (reader.pool[2] == block_value(9, SEED)).all()
    assert json.loads(source.metadata)["host"] == "::1"


def test_it_listens_at_the_worker_s_address_alone() -> None:
    port = json.loads(make("127.0.0.2").metadata)["port"]
    socket.create_connection(("127.0.0.2", port), timeout=DEADLINE_S).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S)


def test_between_two_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Network namespaces; the link breaks without a word, and works again."""
    far = Namespace()
    near = Namespace(
        "link add near type veth peer name far",
        f"link set far netns {far.path()}",
        f"addr add {NEAR}/24 dev near",
        "link set near up",
    )
    try:
        far.ip(f"addr add {FAR}/24 dev far", "link set far up")
        source, reader = far.run(make, FAR), near.run(make, NEAR)
        fill(source.pool, SEED)
        near.run(connect, reader, source, "far")
        wait(reader.post("far", [Run(0, 0, BLOCKS)]))
        assert (reader.pool[5] == block_value(5, SEED)).all()
        monkeypatch.setattr(tcp_reader, "STALL_S", 0.3)
        near.run(connect, reader, source, "far")
        near.ip("link set near down")
        with pytest.raises(TransportError, match=r"far has sent nothing for 0\.3 s"):
            wait(reader.post("far", [Run(0, 0, BLOCKS)]))
        near.ip("link set near up")
        near.run(connect, reader, source, "far")
        wait(reader.post("far", [Run(8, 5, 1)]))
        assert (reader.pool[5] == block_value(8, SEED)).all()
    finally:
        near.close()
        far.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "no.such.invalid"])
def test_an_address_that_nobody_can_connect_to_is_refused(host: str) -> None:
    with pytest.raises(TransportError, match=r"--transport tcp others .* add --advertise ADDRESS"):
        create_transport("tcp", Network(host))


def test_a_pool_on_a_gpu_is_refused() -> None:
    shape = layout(4, BLOCK_KIB)
    with pytest.raises(TransportError, match=r"tcp moves host memory, the KV pool is on meta"):
        create_transport("tcp").register(torch.empty(shape.shape, device="meta"), shape)


def test_an_inference_mode_pool_is_read_into(start: Start) -> None:
    """Workers allocate in inference mode, where torch refuses some writes from outside."""
    with torch.inference_mode():
        transport = make()
    connect(transport, start().pool, "source")
    wait(transport.post("source", [Run(2, 1, 1)]))
    assert (transport.pool[1] == block_value(2, SEED)).all()


def test_what_is_left_of_buffers() -> None:
    buffers = [memoryview(b"abc"), memoryview(b"de"), memoryview(b"f")]
    left = [b"".join(without(buffers, moved)) for moved in range(7)]
    assert left == [b"abcdef"[moved:] for moved in range(7)]
