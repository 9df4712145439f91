"""How blocks travel is named for each peer, and a way that is too slow is refused: for real.

A source that may use TCP only is the silent fallback: without a requirement all works.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from kv_source_process import Source, layout, start_source
from support.transports import skip_unless_there

from tasuki.kv.net_devices import Network
from tasuki.kv.transfer_plan import make_plans
from tasuki.kv.transport import Transport, TransportError, create_transport
from tasuki.kv.ways import Way

pytestmark = pytest.mark.system

BLOCKS, BLOCK_KIB = 4, 64
Start = Callable[[str, str], Source]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a source by the transport's name and what UCX may use there."""
    sources: list[Source] = []

    def begin(transport: str, tls: str) -> Source:
        sources.append(start_source(BLOCKS, BLOCK_KIB, 1, tls, transport))
        return sources[-1]

    yield begin
    for source in sources:
        source.stop()


def _reader(name: str, require: str) -> Transport:
    transport = create_transport(name, network=Network(require=require))
    shape = layout(BLOCKS, BLOCK_KIB)
    transport.register(transport.allocate(shape), shape)
    return transport


def _connect(reader: Transport, source: Source, peer: str) -> Way | None:
    [pair] = make_plans([reader.layout], [source.pool.layout])
    return reader.connect(peer, source.pool.transport_metadata, pair.plan)


@pytest.mark.parametrize("name", ["nixl", "host-staged"])
def test_the_way_of_each_peer_is_named_whatever_came_before(name: str, start: Start) -> None:
    reader = _reader(name, "")
    near, slow = start(name, ""), start(name, "tcp")
    for turn in range(2):  # UCX describes a kind of connection only once
        for source, kind in ((near, "shm"), (slow, "tcp")):
            way = _connect(reader, source, f"{kind}-{turn}")
            assert way is not None and way.kind == kind
            reader.disconnect(f"{kind}-{turn}")


@pytest.mark.parametrize("name", ["nixl", "host-staged"])
def test_a_silent_tcp_is_refused_and_the_peer_is_named(name: str, start: Start) -> None:
    reader = _reader(name, "rdma")
    with pytest.raises(
        TransportError, match=r"KV from slow travels by tcp \(tcp/lo\), --require-transport is rdma"
    ):
        _connect(reader, start(name, "tcp"), "slow")
    way = _connect(reader, start(name, ""), "near")
    assert way is not None and way.kind == "shm"


def test_mooncake_is_tcp(start: Start) -> None:
    skip_unless_there("mooncake")
    source = start("mooncake", "")
    way = _connect(_reader("mooncake", ""), source, "slow")
    assert way is not None and str(way) == "tcp (tcp/127.0.0.1)"
    with pytest.raises(TransportError, match=r"KV from slow travels by tcp .* is rdma: run"):
        _connect(_reader("mooncake", "rdma"), source, "slow")


def test_sockets_are_tcp(start: Start) -> None:
    source = start("tcp", "")
    way = _connect(_reader("tcp", ""), source, "slow")
    assert way is not None and str(way) == "tcp (socket/127.0.0.1)"
    with pytest.raises(TransportError, match=r"KV from slow travels by tcp .* is rdma: run"):
        _connect(_reader("tcp", "rdma"), source, "slow")


def test_shm_is_shared_memory(start: Start) -> None:
    source = start("shm", "")
    way = _connect(_reader("shm", "rdma"), source, "near")
    assert way is not None and str(way) == "shm (memfd)"
    with pytest.raises(TransportError, match=r"KV from near travels by shm \(memfd\), --require"):
        _connect(_reader("shm", "cuda_ipc"), source, "near")


def test_shared_memory_is_no_cuda_ipc(start: Start) -> None:
    with pytest.raises(TransportError, match="--require-transport is cuda_ipc: put both workers"):
        _connect(_reader("nixl", "cuda_ipc"), start("nixl", ""), "near")
