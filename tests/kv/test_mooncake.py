"""What Mooncake's transport promises beside what all do (`test_transports.py`): for real."""

from __future__ import annotations

import ipaddress
import json
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator

import psutil
import pytest
import torch
from kv_source_process import DEADLINE_S, Source, block_value, layout, sources
from support.transports import skip_unless_there

from tasuki.kv import mooncake
from tasuki.kv.listeners import only_to
from tasuki.kv.net_devices import Network
from tasuki.kv.transfer_plan import Run, make_plans
from tasuki.kv.transport import Transfer, Transport, TransportError, create_transport

pytestmark = pytest.mark.system

BLOCKS, BLOCK_KIB, SEED = 4001, 4, 5
Start = Callable[[], Source]


@pytest.fixture(scope="module")
def reader() -> Transport:
    skip_unless_there("mooncake")
    transport = create_transport("mooncake")
    shape = layout(BLOCKS, BLOCK_KIB)
    transport.register(shape.allocate(), shape)
    return transport


@pytest.fixture
def start(reader: Transport) -> Iterator[Start]:
    with sources(BLOCKS, BLOCK_KIB, SEED, "mooncake") as begin:
        yield begin


def connect(reader: Transport, source: Source, peer: str, metadata: bytes = b"") -> None:
    [pair] = make_plans([reader.layout], [source.pool.layout])
    reader.connect(peer, metadata or source.pool.transport_metadata, pair.plan)


def wait(transfer: Transfer) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not transfer.done():
        assert time.monotonic() < deadline_s
        time.sleep(1e-3)


def test_more_rows_than_mooncake_takes_at_a_time(reader: Transport, start: Start) -> None:
    connect(reader, start(), "many")
    reads = [
        reader.post("many", [Run((i * 29 + part) % BLOCKS, i, 1) for i in range(part, BLOCKS, 2)])
        for part in (0, 1)
    ]
    for read in reads:
        wait(read)
    for i in (0, 1, 2, 511, BLOCKS - 1):
        assert (reader.pool[i] == block_value((i * 29 + i % 2) % BLOCKS, SEED)).all()
    reader.disconnect("many")


def test_another_process_on_the_same_port_is_not_read(reader: Transport, start: Start) -> None:
    source = start()
    told = json.loads(source.pool.transport_metadata)
    connect(reader, source, "itself")
    stale = json.dumps(told | {"token": bytes(16).hex()}).encode()
    with pytest.raises(TransportError, match="another process by now"):
        connect(reader, source, "stale", stale)
    connect(reader, source, "itself again")
    wait(reader.post("itself again", [Run(3, 4, 1)]))
    assert (reader.pool[4] == block_value(3, SEED)).all()


def test_a_stopped_or_dead_source_does_not_hold_up_the_thread(
    reader: Transport, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mooncake, "_GREETING_S", 0.5)
    source = start()
    assert source.process.pid is not None
    os.kill(source.process.pid, signal.SIGSTOP)
    with pytest.raises(TransportError, match=r"does not answer within 0\.5 s"):
        connect(reader, source, "stopped")
    source.kill()
    with pytest.raises(TransportError, match="cannot reach"):
        connect(reader, source, "dead")


def test_a_killed_reader_leaves_its_source_alone(reader: Transport, start: Start) -> None:
    source = start()
    context = multiprocessing.get_context("forkserver")
    for _ in range(3):
        begun = context.Event()
        metadata, wire = source.pool.transport_metadata, source.pool.layout.SerializeToString()
        other = context.Process(target=_read_on, args=(metadata, wire, begun), daemon=True)
        other.start()
        assert begun.wait(DEADLINE_S)
        other.kill()
        other.join(DEADLINE_S)
    connect(reader, source, "source")
    wait(reader.post("source", [Run(7, 7, 1)]))
    assert source.process.is_alive()


def _read_on(metadata: bytes, wire: bytes, begun: object) -> None:
    """Read all blocks, again and again."""
    transport = create_transport("mooncake")
    shape = layout(BLOCKS, BLOCK_KIB)
    transport.register(shape.allocate(), shape)
    theirs = type(transport.layout).FromString(wire)
    [pair] = make_plans([transport.layout], [theirs])
    transport.connect("source", metadata, pair.plan)
    while True:
        reads = [transport.post("source", [Run(0, 0, BLOCKS)]) for _ in range(8)]
        begun.set()  # type: ignore[attr-defined]
        for read in reads:
            wait(read)


def test_its_ports_answer_at_the_worker_s_address_alone() -> None:
    skip_unless_there("mooncake")
    before = _ports()
    create_transport("mooncake", Network("127.0.0.2"))
    new = _ports() - before
    assert len(new) == 2
    for port in new:
        socket.create_connection(("127.0.0.2", port), timeout=DEADLINE_S).close()
        with pytest.raises(TimeoutError):
            socket.create_connection(("127.0.0.1", port), timeout=0.3)


@pytest.mark.parametrize(
    ("listen", "address", "other"),
    [("::", "::1", "127.0.0.1"), ("0.0.0.0", "127.0.0.3", "127.0.0.1")],
)
def test_a_filter_lets_one_address_in(listen: str, address: str, other: str) -> None:
    family = socket.AF_INET6 if ":" in listen else socket.AF_INET
    with socket.socket(family) as untouched, socket.socket(family) as listener:
        untouched.bind((listen, 0))
        untouched.listen()
        with only_to(ipaddress.ip_address(address)):
            listener.bind((listen, 0))
            listener.listen()
        port = listener.getsockname()[1]
        socket.create_connection((address, port), timeout=DEADLINE_S).close()
        with pytest.raises(TimeoutError):
            socket.create_connection((other, port), timeout=0.3)
        port = untouched.getsockname()[1]
        socket.create_connection((other, port), timeout=DEADLINE_S).close()


@pytest.mark.parametrize(
    ("host", "said"),
    [("0.0.0.0", "--advertise"), ("::1", "IPv4"), ("no.such.invalid", "--advertise")],
)
def test_an_address_that_it_cannot_use_is_refused(host: str, said: str) -> None:
    skip_unless_there("mooncake")
    with pytest.raises(TransportError, match=said):
        create_transport("mooncake", Network(host))


def test_a_pool_on_a_gpu_is_refused() -> None:
    skip_unless_there("mooncake")
    shape = layout(4, BLOCK_KIB)
    with pytest.raises(
        TransportError, match=r"moves host memory, the KV pool is on meta.*nixl-ucx"
    ):
        create_transport("mooncake").register(torch.empty(shape.shape, device="meta"), shape)


def _ports() -> set[int]:
    connections = psutil.Process().net_connections(kind="tcp")
    return {each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN}
