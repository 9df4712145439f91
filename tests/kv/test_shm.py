"""What shared memory promises beside what all transports do (`test_transports.py`): for real."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import io
import json
import logging
import mmap
import multiprocessing
import os
import resource
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import psutil
import pytest
import torch
from kv_source_process import DEADLINE_S, Source, block_value, layout, sources
from support.namespace import Namespace
from support.waiting import until

from tasuki.kv import greeting
from tasuki.kv.shm_door import Door, Place, Visit
from tasuki.kv.shm_segment import Segment, map_to_read
from tasuki.kv.transfer_plan import Run, make_plans
from tasuki.kv.transport import Transport, TransportError, create_transport

pytestmark = pytest.mark.system

BLOCKS, BLOCK_KIB, SEED = 16, 64, 5
POOL_BYTES = BLOCKS * BLOCK_KIB * 1024
OTHER_USER = 65_534
Start = Callable[[], Source]


@pytest.fixture(scope="module")
def reader() -> Transport:
    transport = create_transport("shm")
    shape = layout(BLOCKS, BLOCK_KIB)
    transport.register(transport.allocate(shape), shape)
    return transport


@pytest.fixture
def start() -> Iterator[Start]:
    with sources(BLOCKS, BLOCK_KIB, SEED, "shm") as begin:
        yield begin


def connect(reader: Transport, source: Source, peer: str, **changed: object) -> None:
    [pair] = make_plans([reader.layout], [source.pool.layout])
    told = json.loads(source.pool.transport_metadata) | changed
    way = reader.connect(peer, json.dumps(told).encode(), pair.plan)
    assert str(way) == "shm (memfd)"


def mapped_here() -> int:
    """Segments that this process has mapped."""
    with open("/proc/self/maps") as maps:
        return sum("memfd:tasuki-kv" in line for line in maps)


def shared_files(process: int | None) -> set[str]:
    """Files of /dev/shm that a process has mapped; others come and go with other tests."""
    with open(f"/proc/{process}/maps") as maps:
        return {line.split(maxsplit=5)[5].rstrip() for line in maps if "/dev/shm/" in line}


def test_what_the_source_writes_later_is_read_too(reader: Transport, start: Start) -> None:
    source = start()
    connect(reader, source, "source")
    for _ in range(2):
        reader.pool.zero_()
        assert reader.post("source", [Run(3, 4, 2)]).done()
        assert (reader.pool[4] == block_value(3, SEED)).all()
        assert (reader.pool[5] == block_value(4, SEED)).all()
        assert not reader.pool[3].any() and not reader.pool[6].any()
    reader.disconnect("source")


def test_nothing_is_left_of_a_killed_source(reader: Transport, start: Start) -> None:
    source, before = start(), mapped_here()
    connect(reader, source, "killed")
    shared = shared_files(source.process.pid)
    assert mapped_here() == before + 1
    assert reader.post("killed", [Run(0, 0, 1)]).done()
    source.kill()
    with pytest.raises(TransportError, match="killed has ended"):
        reader.post("killed", [Run(0, 0, 1)])
    with pytest.raises(TransportError, match=r"again cannot be reached, it has ended"):
        connect(reader, source, "again")
    reader.disconnect("killed")
    assert mapped_here() == before, "the last process that maps it is gone"
    assert not any(map(os.path.exists, shared))
    door = json.loads(source.pool.transport_metadata)["door"]
    with open("/proc/net/unix") as sockets:
        assert door not in sockets.read()


def test_a_killed_reader_leaves_its_source_alone(reader: Transport, start: Start) -> None:
    source = start()
    context = multiprocessing.get_context("forkserver")
    theirs = psutil.Process(source.process.pid)
    before = theirs.num_fds(), theirs.num_threads()
    for _ in range(3):
        begun = context.Event()
        metadata, wire = source.pool.transport_metadata, source.pool.layout.SerializeToString()
        other = context.Process(target=_read_on, args=(metadata, wire, begun), daemon=True)
        other.start()
        assert begun.wait(DEADLINE_S)
        other.kill()
        other.join(DEADLINE_S)
    until(
        lambda: (theirs.num_fds(), theirs.num_threads()) == before,
        "the connections of dead readers are closed",
    )
    connect(reader, source, "source")
    assert reader.post("source", [Run(7, 7, 1)]).done()
    reader.disconnect("source")


def _read_on(metadata: bytes, wire: bytes, begun: Any) -> None:
    """Read all blocks, again and again."""
    transport = create_transport("shm")
    shape = layout(BLOCKS, BLOCK_KIB)
    transport.register(transport.allocate(shape), shape)
    [pair] = make_plans([transport.layout], [type(transport.layout).FromString(wire)])
    transport.connect("source", metadata, pair.plan)
    while True:
        assert transport.post("source", [Run(0, 0, BLOCKS)]).done()
        begun.set()


def test_a_stopped_source_does_not_hold_up_the_thread(
    reader: Transport, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(greeting, "GREETING_S", 0.3)
    source = start()
    assert source.process.pid is not None
    os.kill(source.process.pid, signal.SIGSTOP)
    with pytest.raises(TransportError, match=r"stopped does not answer within 0\.3 s"):
        connect(reader, source, "stopped")
    source.kill()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"host": "00"}, r"far is on another host.*put both on one, or .*--transport nixl-ucx"),
        ({"network": "net:[1]"}, r"another network namespace .*both in one container.*nixl-ucx"),
        ({"users": "user:[1]"}, r"another user namespace .*in one container.*nixl-ucx"),
        ({"key": "00" * 32}, "far closed the connection: it is another process by now, .*ended"),
        ({"door": "tasuki-kv-nobody"}, "far cannot be reached, it has ended"),
        ({"bytes": POOL_BYTES + 1}, "is not one of 1048577 that keeps its size"),
        ({"bytes": POOL_BYTES - 1}, "the peer's blocks lie from"),
        ({"address": 4096}, "the peer's blocks lie from"),
        ({"key": "not hexadecimal"}, "far tells of no shared memory"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_be_mapped_is_refused_with_the_remedy(
    reader: Transport, start: Start, changed: dict[str, object], said: str
) -> None:
    source = start()
    before = mapped_here(), len(os.listdir("/proc/self/fd"))
    with pytest.raises(TransportError, match=said):
        connect(reader, source, "far", **changed)
    assert mapped_here() == before[0]
    assert len(os.listdir("/proc/self/fd")) <= before[1], "nothing stays open"


@pytest.mark.parametrize("left", [0, 1])
def test_a_reader_without_descriptors_says_so(
    reader: Transport, start: Start, monkeypatch: pytest.MonkeyPatch, left: int
) -> None:
    source = start()
    before, introduce = len(os.listdir("/proc/self/fd")), greeting.introduce
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)

    def limit() -> int:
        """Of open files, so that none can be opened from now on."""
        lowest = os.dup(0)
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
        return lowest

    def limited(connection: socket.socket, key: bytes) -> bytes:
        limit()
        return introduce(connection, key)

    if left:  # for the connection, none for what comes through it
        monkeypatch.setattr(greeting, "introduce", limited)
    try:
        if not left:
            limit()
        said = r"no descriptor is left .* pool of far: the limit is \d+, raise it \(ulimit -n\)"
        with pytest.raises(TransportError, match=said):
            connect(reader, source, "far")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_worker_in_another_network_namespace_is_refused(start: Start) -> None:
    """For real, and nothing of the source could be reached from there."""
    source, elsewhere = start(), Namespace()
    try:

        def read() -> None:
            transport = create_transport("shm")
            shape = layout(BLOCKS, BLOCK_KIB)
            transport.register(transport.allocate(shape), shape)
            connect(transport, source, "far")

        with pytest.raises(TransportError, match=r"far is in another network namespace of this"):
            elsewhere.run(read)
        told = json.loads(source.pool.transport_metadata)
        with pytest.raises(TransportError, match="cannot be reached"):
            elsewhere.run(Visit, "far", told["door"], bytes.fromhex(told["key"]))
    finally:
        elsewhere.close()


def test_a_pool_on_a_gpu_is_refused() -> None:
    shape = layout(4, BLOCK_KIB)
    with pytest.raises(
        TransportError,
        match=r"--transport shm moves host memory, the KV pool is on cuda:0: use .*nixl-ucx",
    ):
        create_transport("shm").allocate(shape, "cuda:0")


def test_a_reader_cannot_change_what_it_reads() -> None:
    segment = Segment(8192)
    segment.memory[:4] = b"kept"
    mapped = map_to_read(segment.descriptor, 8192)
    assert bytes(mapped[:4]) == b"kept"
    with pytest.raises(ValueError, match="read-only"):
        mapped[0] = 1
    with pytest.raises(PermissionError):
        mmap.mmap(segment.descriptor, 8192)
    with pytest.raises(PermissionError):
        os.pwrite(segment.descriptor, b"lost", 0)
    for size in (4096, 16_384):
        with pytest.raises(PermissionError):
            os.ftruncate(segment.descriptor, size)
    segment.memory[:4] = b"ours"
    assert bytes(mapped[:4]) == b"ours"


def test_memory_that_could_shrink_under_the_reader_is_refused() -> None:
    for flags in (os.MFD_ALLOW_SEALING, 0):
        descriptor = os.memfd_create("loose", flags)
        os.ftruncate(descriptor, 8192)
        with pytest.raises(TransportError, match="keeps its size"):
            map_to_read(descriptor, 8192)
        if flags:
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            assert len(map_to_read(descriptor, 8192)) == 8192
        os.close(descriptor)


def test_a_reader_without_the_key_gets_nothing() -> None:
    segment = Segment(4096)
    door = Door(segment.descriptor)
    for answer in (b"", b"short", os.urandom(16 + 32)):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
            stranger.settimeout(DEADLINE_S)
            stranger.connect(f"\0{door.name}")
            assert len(stranger.recv(64)) == 16
            stranger.send(answer) if answer else stranger.shutdown(socket.SHUT_WR)
            reply, descriptors, _, _ = socket.recv_fds(stranger, 64, 1)
            assert (reply, descriptors) == (b"", [])
    visit = Visit("source", door.name, door.key)
    assert os.fstat(visit.descriptor).st_size == 4096
    os.close(visit.descriptor)
    visit.end()


def test_a_source_without_the_key_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process that took the name gives a segment, and no proof; or it is silent."""
    segment, key = Segment(4096), bytes(32)
    before = len(os.listdir("/proc/self/fd"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("\0tasuki-kv-impostor")
        listener.listen()

        def answer() -> None:
            with listener.accept()[0] as reader:
                reader.send(bytes(16))
                reader.recv(64)
                socket.send_fds(reader, [bytes(32)], [segment.descriptor])

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(TransportError, match="another key: it is another process by now"):
            Visit("source", "tasuki-kv-impostor", key)
        thread.join(DEADLINE_S)
        monkeypatch.setattr(greeting, "GREETING_S", 0.3)
        with pytest.raises(TransportError, match="does not answer"):
            Visit("source", "tasuki-kv-impostor", key)
    assert len(os.listdir("/proc/self/fd")) <= before, "nothing stays open"


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_a_source_that_cannot_give_its_descriptor_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The kernel limits how many descriptors of a user are under way."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    other = context.Process(target=_with_too_many_under_way, args=(theirs,))
    other.start()
    theirs.close()
    assert ours.poll(DEADLINE_S)
    said, logged = ours.recv()
    assert "far closed the connection: it is another process by now, has ended, or" in said
    assert "the KV pool cannot be given to a reader: [Errno 109] Too many references" in logged
    other.join(DEADLINE_S)
    assert other.exitcode == 0


def _with_too_many_under_way(pipe: Connection) -> None:
    log = io.StringIO()
    logging.basicConfig(stream=log, force=True)
    assert ctypes.CDLL(None).setuid(OTHER_USER) == 0
    for inherited in set(map(int, os.listdir("/proc/self/fd"))) - {0, 1, 2, pipe.fileno()}:
        with contextlib.suppress(OSError):  # that of the folder itself
            os.close(inherited)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    door = Door(os.memfd_create("pool"))
    filled, _kept = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with contextlib.suppress(OSError):
        while True:
            socket.send_fds(filled, [b"x"], [0])
    try:
        Visit("far", door.name, door.key)
    except TransportError as error:
        pipe.send((str(error), log.getvalue()))


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_another_user_gets_nothing_and_is_not_believed(caplog: pytest.LogCaptureFixture) -> None:
    segment = Segment(4096)
    door = Door(segment.descriptor)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    other = context.Process(target=_as_another_user, args=(door.name, door.key, theirs))
    other.start()
    assert ours.poll(DEADLINE_S)
    assert ours.recv() == "source runs as user 0, this worker as 65534: start both as one user"
    assert ours.poll(DEADLINE_S)
    assert ours.recv() == b"", "closed before a word was said"
    until(lambda: "user 65534 asked for the KV pool of user 0" in caplog.text, "the log")
    other.join(DEADLINE_S)
    assert other.exitcode == 0


def _as_another_user(name: str, key: bytes, pipe: Connection) -> None:
    libc = ctypes.CDLL(None)
    assert libc.setuid(OTHER_USER) == 0
    try:
        Visit("source", name, key)
    except TransportError as error:
        pipe.send(str(error).partition(",")[0] + "," + str(error).split(",")[1])
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.connect(f"\0{name}")
        pipe.send(stranger.recv(64))


def test_places_are_told_apart() -> None:
    here = Place.here()
    assert here == Place.here() and all((here.host, here.network, here.users))
    here.check("itself", here)
    with pytest.raises(TransportError, match="another host"):
        here.check("far", replace(here, host="another"))


def test_an_inference_mode_pool_is_read_into(reader: Transport, start: Start) -> None:
    """Workers allocate in inference mode, where torch refuses some writes from outside."""
    with torch.inference_mode():
        transport = create_transport("shm")
        shape = layout(BLOCKS, BLOCK_KIB)
        transport.register(transport.allocate(shape), shape)
    connect(transport, start(), "source")
    assert transport.post("source", [Run(2, 1, 1)]).done()
    assert (transport.pool[1] == block_value(2, SEED)).all()
