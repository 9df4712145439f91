"""The transfer thread: bounds, ends, errors; over a transport that does as it is told."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch

from tasuki.kv.effects import CancelPull, Pull, PullDone, PullProgress
from tasuki.kv.layout import CacheLayout
from tasuki.kv.puller import Connect, Forget, PeerFailed, Puller, PullerReport
from tasuki.kv.transfer_plan import Run, TransferPlan, make_plans
from tasuki.kv.transport import TransportError, metadata_digest

DEADLINE_S = 60.0
PROBE = -1  # an order that ends at once
LAYOUT = CacheLayout(
    num_blocks=64, kv_heads=1, layers=1, block_size=4, head_dim=8, dtype=torch.float32
)


class Scripted:
    """A transport whose transfers end when the test says so."""

    name = "scripted"
    max_inflight_bytes = 4 * LAYOUT.block_bytes

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.posted: queue.Queue[Handle] = queue.Queue()
        self.fail_connect = False
        self.away: set[str] = set()  # who does not answer yet
        self.closed = threading.Event()

    def reached(self, peer: str, metadata: bytes, plan: TransferPlan) -> bool:
        return peer not in self.away

    def connect(self, peer: str, metadata: bytes, plan: TransferPlan) -> None:
        self.calls.append(f"connect {peer}")
        if self.fail_connect:
            raise TransportError("no route")

    def disconnect(self, peer: str) -> None:
        self.calls.append(f"disconnect {peer}")

    def post(self, peer: str, runs: Sequence[Run]) -> Handle:
        handle = Handle(sum(run.count for run in runs))
        self.posted.put(handle)
        return handle

    def close(self) -> None:
        self.closed.set()


class Handle:
    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.state = "moving"

    def done(self) -> bool:
        if self.state == "error":
            raise TransportError("remote disconnect")
        return self.state == "done"


class Bench:
    def __init__(self) -> None:
        self.transport = Scripted()
        self.reports: queue.Queue[PullDone | PeerFailed] = queue.Queue()
        self.probes: queue.Queue[int] = queue.Queue()
        self.progress: queue.Queue[int] = queue.Queue()
        self.later_s = 0.0
        clock = lambda: 100.0 + self.later_s  # noqa: E731
        self.puller = Puller(self.transport, self._report, clock)  # type: ignore[arg-type]
        self.puller.start()
        wire = LAYOUT.to_wire(LAYOUT.allocate(), transport="scripted")
        [pair] = make_plans([wire], [wire])
        self.plan = pair.plan

    def _report(self, event: PullerReport) -> None:
        if isinstance(event, PullDone) and event.order_id == PROBE:
            self.probes.put(PROBE)
        elif isinstance(event, PullProgress):
            self.progress.put(event.order_id)
        else:
            self.reports.put(event)

    def connect(self, peer: str = "p", digest: bytes | None = None, readers: int = 1) -> None:
        metadata = b"metadata"
        digest = digest or metadata_digest(metadata)
        self.puller.put(Connect(peer, metadata, digest, replace(self.plan, readers=readers)))

    def pull(self, order_id: int, blocks: int, peer: str = "p", first: int = 0) -> None:
        self.puller.put(Pull(order_id, peer, [(first + i, i) for i in range(blocks)]))

    def handle(self) -> Handle:
        return self.transport.posted.get(timeout=DEADLINE_S)

    def done(self) -> PullDone:
        report = self.reports.get(timeout=DEADLINE_S)
        assert isinstance(report, PullDone)
        return report


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.puller.stop()
    assert bench.transport.closed.is_set()


def settled(bench: Bench) -> None:
    """Wait until the thread has taken every command given so far."""
    for _ in range(2):  # the second is taken after a whole turn of the thread
        bench.puller.put(Pull(PROBE, "nobody", []))
        bench.probes.get(timeout=DEADLINE_S)


def test_bytes_under_way_stay_below_the_bound(bench: Bench) -> None:
    bench.connect()
    bench.pull(1, 10)
    first, second = bench.handle(), bench.handle()
    assert (first.blocks, second.blocks) == (2, 2)
    settled(bench)
    assert bench.transport.posted.empty()
    bench.later_s = 5.0
    first.state = "done"
    third = bench.handle()
    settled(bench)
    assert bench.transport.posted.empty()
    second.state = third.state = "done"
    for _ in range(2):
        bench.handle().state = "done"
    done = bench.done()
    assert (done.order_id, done.error) == (1, "")
    assert done.moved_bytes == 10 * LAYOUT.block_bytes
    assert (done.posted_s, done.finished_s) == (100.0, 105.0)


def test_progress_is_reported_now_and_then(bench: Bench) -> None:
    bench.connect()
    bench.pull(1, 10)
    first = bench.handle()
    bench.later_s += 60.0
    first.state = "done"
    for _ in range(4):
        bench.handle().state = "done"
    bench.done()
    settled(bench)
    assert bench.progress.get_nowait() == 1
    assert bench.progress.empty(), "once in a while is enough"


def test_progress_is_reported_well_within_the_least_timeout(bench: Bench) -> None:
    bench.connect()
    bench.pull(1, 10)
    for _ in range(4):
        handle = bench.handle()
        bench.later_s += 0.03  # of 0.1
        handle.state = "done"
        assert bench.progress.get(timeout=DEADLINE_S) == 1
    bench.handle().state = "done"
    bench.done()


def test_ranks_that_read_the_same_peer_share_the_bound(bench: Bench) -> None:
    bench.connect(readers=2)
    bench.pull(1, 4)
    first, second = bench.handle(), bench.handle()
    assert (first.blocks, second.blocks) == (1, 1)
    settled(bench)
    assert bench.transport.posted.empty()
    first.state = second.state = "done"
    for _ in range(2):
        bench.handle().state = "done"
    assert bench.done().moved_bytes == 4 * LAYOUT.block_bytes


def test_peers_do_not_wait_for_one_another(bench: Bench) -> None:
    bench.connect("p")
    bench.connect("q")
    bench.pull(1, 4, "p")
    stuck = [bench.handle(), bench.handle()]
    bench.pull(2, 2, "q")
    bench.handle().state = "done"
    assert bench.done().order_id == 2
    for handle in stuck:
        handle.state = "done"
    assert bench.done().order_id == 1


def test_a_failed_order_is_reported_only_when_all_of_it_has_ended(bench: Bench) -> None:
    bench.connect()
    bench.pull(1, 8)
    first, second = bench.handle(), bench.handle()
    first.state = "error"
    settled(bench)
    bench.puller.put(CancelPull(1))  # why it failed is still what is reported
    settled(bench)
    assert bench.reports.empty(), "the second piece may still write"
    second.state = "done"
    done = bench.done()
    assert "remote disconnect" in done.error
    assert done.moved_bytes == 2 * LAYOUT.block_bytes
    assert bench.transport.posted.empty()


def test_a_peer_is_connected_anew_after_a_failure(bench: Bench) -> None:
    bench.connect()
    bench.pull(1, 1)
    bench.handle().state = "error"
    assert bench.done().error
    bench.pull(2, 1)
    bench.handle().state = "done"
    assert not bench.done().error
    assert bench.transport.calls == ["connect p", "disconnect p", "connect p"]


def test_nothing_is_under_way_from_a_peer_that_is_connected_anew(bench: Bench) -> None:
    bench.connect()
    bench.pull(1, 4)
    bench.pull(2, 1)
    first, second = bench.handle(), bench.handle()
    first.state = "error"
    settled(bench)
    assert bench.transport.calls == ["connect p"]
    second.state = "done"
    assert bench.done().order_id == 1
    bench.handle().state = "done"
    assert not bench.done().error
    assert bench.transport.calls == ["connect p", "disconnect p", "connect p"]


def test_a_cancelled_order_ends_when_what_is_posted_has(bench: Bench) -> None:
    bench.connect()
    bench.pull(1, 8)
    bench.pull(2, 8)
    handles = [bench.handle(), bench.handle()]
    bench.puller.put(CancelPull(2))
    assert bench.done().error == "cancelled"
    bench.puller.put(CancelPull(1))
    settled(bench)
    assert bench.reports.empty()
    for handle in handles:
        handle.state = "done"
    done = bench.done()
    assert (done.order_id, done.error) == (1, "cancelled")


def test_a_peer_that_does_not_answer_yet_holds_up_its_own_orders_alone(bench: Bench) -> None:
    bench.transport.away.add("p")
    bench.connect("p")
    for order_id in (1, 2):
        bench.pull(order_id, 1, "p")
    bench.puller.put(CancelPull(1))
    assert (bench.done().error, bench.reports.empty()) == ("cancelled", True)
    bench.connect("q")
    bench.pull(3, 1, "q")
    bench.handle().state = "done"
    assert bench.done().order_id == 3
    bench.transport.away.clear()
    bench.handle().state = "error"
    assert bench.done().order_id == 2
    # The same where it was connected before.
    bench.transport.away.add("p")
    bench.pull(4, 1, "p")
    settled(bench)
    assert bench.transport.calls == ["connect q", "connect p", "disconnect p"]
    bench.transport.away.clear()
    bench.handle().state = "done"
    done = bench.done()
    assert (done.order_id, done.error, done.reconnects) == (4, "", 1)


def test_orders_of_a_peer_that_has_ended_fail_together(bench: Bench) -> None:
    bench.connect()
    for order_id in (1, 2, 3):
        bench.pull(order_id, 2)
    first, second = bench.handle(), bench.handle()
    settled(bench)
    bench.transport.away.add("p")
    bench.transport.fail_connect = True
    first.state = second.state = "error"
    assert {bench.done().order_id for _ in range(2)} == {1, 2}
    settled(bench)
    assert bench.reports.empty(), "the third waits for the peer"
    bench.pull(4, 1)
    settled(bench)
    bench.transport.away.clear()
    assert [(done.order_id, done.error) for done in (bench.done(), bench.done())] == [
        (3, "no route"),
        (4, "no route"),
    ]
    settled(bench)
    assert bench.transport.calls.count("connect p") == 2, "once for both"
    bench.transport.fail_connect = False
    bench.pull(5, 1)
    bench.handle().state = "done"
    assert not bench.done().error


def test_a_peer_that_never_answers_is_left(bench: Bench) -> None:
    bench.transport.away.add("p")
    bench.connect("p")
    bench.pull(1, 1)
    bench.puller.put(CancelPull(1))
    assert bench.done().error == "cancelled"
    bench.transport.away.clear()
    bench.transport.fail_connect = True
    assert bench.reports.get(timeout=DEADLINE_S) == PeerFailed("p", "no route")
    bench.transport.away.add("q")
    bench.connect("q")
    bench.puller.put(Forget("q"))
    settled(bench)
    assert bench.transport.calls == ["connect p", "disconnect p", "disconnect q"]
    assert bench.reports.empty()


def test_a_corrupt_metadata_blob_never_reaches_the_transport(bench: Bench) -> None:
    bench.connect(digest=bytes(16))
    report = bench.reports.get(timeout=DEADLINE_S)
    assert isinstance(report, PeerFailed)
    assert "corrupted" in report.message
    assert bench.transport.calls == []


def test_a_peer_that_cannot_be_connected_is_reported(bench: Bench) -> None:
    bench.transport.fail_connect = True
    bench.connect()
    assert bench.reports.get(timeout=DEADLINE_S) == PeerFailed("p", "no route")
    bench.pull(1, 1)
    assert "not connected" in bench.done().error


def test_a_pool_stays_as_it_is_while_it_is_read(bench: Bench) -> None:
    bench.connect()
    bench.pull(1, 1)
    handle = bench.handle()
    bench.puller.put(Connect("p", b"other", metadata_digest(b"other"), bench.plan))
    report = bench.reports.get(timeout=DEADLINE_S)
    assert isinstance(report, PeerFailed) and "a pool must stay as it is" in report.message
    handle.state = "done"
    assert not bench.done().error


def test_blocks_outside_the_peers_pool_fail_the_order(bench: Bench) -> None:
    bench.connect()
    bench.pull(1, 2, first=63)
    assert "remote block 64 of 64" in bench.done().error


def test_a_peer_is_left_after_its_last_transfer(bench: Bench) -> None:
    bench.connect()
    bench.pull(1, 1)
    handle = bench.handle()
    bench.puller.put(Forget("p"))
    settled(bench)
    assert bench.transport.calls == ["connect p"]
    handle.state = "done"
    bench.done()
    wait_for(bench, lambda: "disconnect p" in bench.transport.calls)


def test_a_peer_that_is_wanted_again_before_it_is_left_stays(bench: Bench) -> None:
    bench.connect()
    bench.pull(1, 1)
    handle = bench.handle()
    bench.puller.put(Forget("p"))
    bench.connect()
    handle.state = "done"
    bench.done()
    settled(bench)
    bench.pull(2, 1)
    bench.handle().state = "done"
    assert not bench.done().error
    assert bench.transport.calls == ["connect p"]


def wait_for(bench: Bench, condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        settled(bench)
    raise AssertionError("it never happened")
