"""Measures a link: reads of a source's memory by the transport and thread that workers use."""

from __future__ import annotations

import multiprocessing
import signal
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from tasuki.kv.backends import DEFAULT
from tasuki.kv.measure import Blocks, Link
from tasuki.kv.rdma_devices import rdma_devices
from tasuki.kv.ways import Way
from tasuki.linkbench.points import LinkbenchError, Point
from tasuki.linkbench.rivals import rates
from tasuki.linkbench.source import SourceClient, be_source, make_memory

_START_S = 120.0
_READ_S = 120.0
_ENOUGH_S = 5.0  # a point that has taken so long is read no more, after its third read
_LEAST_READS = 3


@dataclass(frozen=True, slots=True)
class Setup:
    """Who reads what, and how often.

    Attributes:
        peer: host:port of `tasuki linkbench --listen`; empty: a process of this machine.
        host: Address of ours whose network is used.
        devices: Of the source's and the reader's memory.
        transport: As in `create_transport`.
        repeats: Reads of each point, after one that warms up.
    """

    peer: str = ""
    host: str = "127.0.0.1"
    devices: tuple[str, str] = ("cpu", "cpu")
    transport: str = DEFAULT
    repeats: int = 20


@dataclass(frozen=True, slots=True)
class Row:
    """One point, measured.

    Attributes:
        seconds: Of each read, from its first post to its last byte.
        post_s: Of each, what handing its descriptors to the transport took.
    """

    point: Point
    seconds: tuple[float, ...]
    post_s: tuple[float, ...]

    @property
    def bytes_per_s(self) -> float:
        """Of the median read."""
        return self.point.payload_bytes / statistics.median(self.seconds)

    def to_json(self) -> dict[str, Any]:
        """As a result file has it."""
        return {
            "payload_bytes": self.point.payload_bytes,
            "block_bytes": self.point.block_bytes,
            "descriptors": self.point.descriptors,
            "p50_s": statistics.median(self.seconds),
            "p99_s": p99(self.seconds),
            "post_p50_s": statistics.median(self.post_s),
            "post_p99_s": p99(self.post_s),
            "bytes_per_s": self.bytes_per_s,
            "reads": len(self.seconds),
        }


@dataclass(slots=True)
class Measured:
    """All of a run.

    Attributes:
        rivals: Bytes per second by name, for each payload.
        way: How the reads travelled, as UCX names it; None: unknown.
        warning: That a faster way is there; empty: none is known.
    """

    rows: list[Row] = field(default_factory=list)
    rivals: dict[int, dict[str, float]] = field(default_factory=dict)
    way: Way | None = None
    warning: str = ""


def p99(values: Sequence[float]) -> float:
    """The 99th percentile: of few values the largest."""
    return sorted(values)[min(len(values) - 1, int(0.99 * len(values)))]


def measure(
    points: Sequence[Point], setup: Setup, show: Callable[[Row], None] = lambda _: None
) -> Measured:
    """Measure points, with the rivals of each payload.

    Args:
        points: At least one.
        setup: Who reads what.
        show: Called with each row as it is there.

    Raises:
        LinkbenchError: There is no source, no memory, or wrong bytes came.
        TransportError: The source cannot be read.
    """
    size_bytes = max(2 * point.payload_bytes for point in points)
    found = Measured()
    with _source_of(setup) as client:
        pool = client.pool(size_bytes)
        blocks = make_memory(size_bytes, setup.devices[1], setup.transport, setup.host)
        link = Link(blocks, pool, setup.peer or "the source")
        try:
            for point in points:
                link.cut(point.block_bytes)
                row, found.way = _read(point, link, blocks, setup.repeats)
                found.rows.append(row)
                show(row)
        finally:
            link.close()
        for payload in sorted({point.payload_bytes for point in points}):
            found.rivals[payload] = rates(payload, client, setup.devices, setup.repeats)
    found.warning = faster(found.way, setup)
    return found


def _read(point: Point, link: Link, blocks: Blocks, repeats: int) -> tuple[Row, Way | None]:
    """Read one point, and check every word that came the first time."""
    blocks.clear()
    way = link.read(point.blocks, _READ_S).way
    _check(point, blocks)
    seconds: list[float] = []
    post_s: list[float] = []
    while len(seconds) < repeats and (sum(seconds) < _ENOUGH_S or len(seconds) < _LEAST_READS):
        reading = link.read(point.blocks, _READ_S)
        if reading.descriptors != point.descriptors:
            raise LinkbenchError(
                f"{point.descriptors} blocks were read as {reading.descriptors} descriptors"
            )
        seconds.append(reading.seconds)
        post_s.append(reading.post_s)
    return Row(point, tuple(seconds), tuple(post_s)), way


def _check(point: Point, blocks: Blocks) -> None:
    """Each word that was read is its number, and the words between are still 0."""
    words = blocks.memory.view(-1).view(torch.int64)
    per_block = point.block_bytes // 8
    got = words[: 2 * point.descriptors * per_block].view(point.descriptors, 2, per_block)
    numbers = torch.arange(got.numel(), dtype=torch.int64, device=words.device).view(got.shape)
    if not bool((got[:, 0] == numbers[:, 0]).all()) or bool(got[:, 1].any()):
        raise LinkbenchError(
            f"{point.descriptors} blocks of {point.block_bytes} bytes did not arrive as they are at"
            " the source: check the memory and the network between the two"
        )


@contextmanager
def _source_of(setup: Setup) -> Iterator[SourceClient]:
    """A connection to the source, which is started if it is one of this machine."""
    if setup.peer:
        client = SourceClient(setup.peer)
        yield client
        client.close()
        return
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    arguments = (theirs, setup.devices[0], setup.transport)
    child = context.Process(target=be_source, args=arguments, daemon=True)
    # Ctrl-C is for this process, which ends the child; the child would print a traceback.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        child.start()
    finally:
        signal.signal(signal.SIGINT, before)
    theirs.close()
    try:
        try:
            port = pipe.recv() if pipe.poll(_START_S) else f"none in {_START_S:g} s"
        except EOFError:
            port = "its process ended; its own words are above"
        if isinstance(port, str):
            raise LinkbenchError(f"the source did not start: {port}")
        client = SourceClient(f"127.0.0.1:{port}")
        yield client
        client.close()
    finally:
        child.terminate()
        child.join(10)


def faster(way: Way | None, setup: Setup) -> str:
    """Which faster way there is than the one that was used; empty: none that is known."""
    if way is None:
        return ""
    if setup.transport in ("mooncake", "tcp") and not setup.peer:
        return "shared memory is faster on one machine: --transport nixl-ucx or shm"
    if setup.transport == "mooncake":
        return ""
    on_gpus = all(device.startswith("cuda") for device in setup.devices)
    if not setup.peer and set(setup.devices) == {"cpu"} and way.kind == "shm":
        faster_one = "both memories are the CPU's and on this machine: --transport shm is faster"
        return "" if setup.transport == "shm" else faster_one
    if not setup.peer and on_gpus and way.kind != "cuda_ipc":
        return "both memories are on GPUs of this machine, where CUDA IPC is faster"
    if not setup.peer and not on_gpus and way.kind == "tcp":
        return "both processes are on this machine, where shared memory is faster (unset UCX_TLS)"
    if setup.peer and way.kind == "tcp" and rdma_devices():
        return "this machine has RDMA devices; `tasuki preflight` says what they lack"
    if setup.peer and way.kind == "tcp" and set(setup.devices) == {"cpu"}:
        faster_one = "both memories are the CPU's: --transport tcp is faster than UCX over TCP"
        return "" if setup.transport == "tcp" else faster_one
    return ""
