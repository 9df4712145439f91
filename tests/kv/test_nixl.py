"""NIXL for real: two processes, bytes compared, the far side killed."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from kv_source_process import DEADLINE_S, Source, block_value, fill, layout, start_source

from tasuki.kv.effects import Pull, PullDone
from tasuki.kv.nixl import NixlTransport
from tasuki.kv.puller import Connect, PeerFailed, Puller
from tasuki.kv.transfer_plan import make_plans
from tasuki.kv.transport import TransportError, UnknownTransportError, create_transport

pytestmark = pytest.mark.system

NUM_BLOCKS = 64
BLOCK_KIB = 256
SEED = 3
IDLE_SHARE = 0.03
IDLE_S = 4.0


class Reader:
    """Our side: a pool, an agent and a transfer thread."""

    def __init__(self) -> None:
        shape = layout(NUM_BLOCKS, BLOCK_KIB)
        self.pool = shape.allocate()
        self.transport = NixlTransport()
        self.transport.register(self.pool, shape)
        self.reports: queue.Queue[PullDone | PeerFailed] = queue.Queue()
        self.puller = Puller(self.transport, self.reports.put)
        self.puller.start()
        self._orders = 0

    def connect(self, source: Source, name: str = "source") -> None:
        [pair] = make_plans([self.transport.layout], [source.pool.layout])
        digest = source.pool.transport_metadata_digest
        self.puller.put(Connect(name, source.pool.transport_metadata, digest, pair.plan))

    def pull(self, pairs: list[tuple[int, int]], name: str = "source") -> PullDone:
        self._orders += 1
        self.puller.put(Pull(self._orders, name, pairs))
        report = self.reports.get(timeout=DEADLINE_S)
        assert isinstance(report, PullDone)
        assert report.order_id == self._orders
        return report


@pytest.fixture(scope="module")
def reader() -> Iterator[Reader]:
    reader = Reader()
    yield reader
    reader.puller.stop()


Start = Callable[..., Source]


@pytest.fixture
def start() -> Iterator[Start]:
    sources: list[Source] = []

    def begin(**options: str) -> Source:
        sources.append(start_source(NUM_BLOCKS, BLOCK_KIB, SEED, **options))
        return sources[-1]

    yield begin
    for source in sources:
        source.stop()


@pytest.mark.parametrize("tls", ["", "tcp"], ids=["any", "tcp"])
def test_blocks_arrive_as_they_are_adjacent_or_scattered(
    reader: Reader, start: Start, tls: str
) -> None:
    source = start(tls=tls)
    name = f"source {tls}"
    reader.connect(source, name)
    scattered = [((i * 29 + 7) % NUM_BLOCKS, i) for i in range(0, NUM_BLOCKS, 2)]
    adjacent = [(i, i + 20) for i in range(30)]
    for pairs, descriptors in ((scattered, len(scattered)), (adjacent, 2)):
        fill(reader.pool, 9)
        done = reader.pull(pairs, name)
        assert not done.error
        assert done.descriptors <= descriptors
        assert done.moved_bytes == len(pairs) * BLOCK_KIB * 1024
        written = {ours: block_value(remote, SEED) for remote, ours in pairs}
        for block in range(NUM_BLOCKS):
            wanted = written.get(block, block_value(block, 9))
            assert torch.equal(reader.pool[block], torch.full_like(reader.pool[block], wanted))
    assert source.stop() == 0


@pytest.mark.parametrize("tls", ["", "tcp"], ids=["any", "tcp"])
def test_a_source_killed_in_mid_pull_is_an_error_and_no_hang(
    reader: Reader, start: Start, tls: str
) -> None:
    source = start(tls=tls)
    name = f"victim {tls}"
    reader.connect(source, name)
    assert not reader.pull([(0, 0)], name).error
    everything = [((i * 29) % NUM_BLOCKS, i) for i in range(NUM_BLOCKS)]
    for order_id in range(1000, 1040):
        reader.puller.put(Pull(order_id, name, everything))
    source.kill()
    reports = [reader.reports.get(timeout=DEADLINE_S) for _ in range(40)]
    assert all(isinstance(report, PullDone) for report in reports)
    assert isinstance(reports[-1], PullDone)
    assert reports[-1].error
    successor = start(tls=tls)
    reader.connect(successor, f"{name} again")
    assert not reader.pull(everything, f"{name} again").error


def test_corrupt_metadata_is_refused_and_harms_nothing(reader: Reader, start: Start) -> None:
    source = start()
    whole = source.pool.transport_metadata
    source.pool.transport_metadata = whole[:40] + b"garbled!" + whole[48:]
    reader.connect(source, "corrupt")
    report = reader.reports.get(timeout=DEADLINE_S)
    assert isinstance(report, PeerFailed)
    assert "corrupted on the way" in report.message
    source.pool.transport_metadata = whole
    reader.connect(source, "whole")
    assert not reader.pull([(5, 5)], "whole").error


def test_idle_agents_leave_the_processor_alone(reader: Reader, start: Start) -> None:
    source = start()
    reader.connect(source)
    assert not reader.pull([(1, 1)]).error

    def busier() -> float:
        """Share of a core that the busier of the two processes used for a while."""
        ours_s, wall_s = time.process_time(), time.monotonic()
        theirs = source.idle_cpu_fraction(IDLE_S)
        return max(theirs, (time.process_time() - ours_s) / (time.monotonic() - wall_s))

    # An agent that polls does so in every window; what else this process has to do ends.
    windows = [busier()]
    while windows[-1] >= IDLE_SHARE and len(windows) < 5:
        windows.append(busier())
    assert windows[-1] < IDLE_SHARE, windows


def test_what_is_not_there_is_refused_with_what_is() -> None:
    with pytest.raises(UnknownTransportError, match="'teleport': there is host-staged, nixl"):
        create_transport("teleport")
    with pytest.raises(TransportError, match=r"no network backend 'MAGIC': there is .*UCX"):
        create_transport("nixl", "MAGIC")


def test_a_backend_whose_libraries_are_missing_is_refused_at_start() -> None:
    with pytest.raises(TransportError, match=r"backend LIBFABRIC does not start here .*UCX"):
        create_transport("nixl", "LIBFABRIC")


def environment_after(host: str, **own: str) -> list[str]:
    """What UCX is told by a worker at `host` whose operator has set `own`."""
    code = (
        "import os; from tasuki.kv.transport import create_transport;"
        f"create_transport('nixl', host={host!r});"
        "print(os.environ['UCX_NET_DEVICES'], os.environ['UCX_DEBUG_SIGNO'])"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("UCX_")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment | own,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=True,
    )
    return done.stdout.split()[-2:]


def test_transfers_use_the_network_that_the_worker_is_bound_to() -> None:
    assert environment_after("127.0.0.1") == ["lo", "0"]
    assert environment_after("0.0.0.0") == ["all", "0"]


def test_settings_of_the_operator_are_kept() -> None:
    assert environment_after("127.0.0.1", UCX_NET_DEVICES="all") == ["all", "0"]
