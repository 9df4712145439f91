"""Peers that do not answer hold up their own orders alone; connections that nobody takes end."""

from __future__ import annotations

import os
import queue
import signal
import threading
import time

import pytest
from handoff_rig import LegEndReason, Rig, prompt, spec
from kv_source_process import DEADLINE_S, Source, block_value, layout, sources
from support.transports import TRANSPORTS, skip_unless_there

from tasuki.engine.errors import FailureKind
from tasuki.kv import greeting, host_staged, mooncake, nixl_agent
from tasuki.kv.effects import Pull, PullDone
from tasuki.kv.puller import Connect, PeerFailed, Puller, PullerReport
from tasuki.kv.reaching import Joining, Reaching, Steps
from tasuki.kv.tcp_reader import TcpPeer
from tasuki.kv.tcp_source import TcpSource
from tasuki.kv.transfer_plan import Run, TransferPlan, make_plans
from tasuki.kv.transport import TransportError, create_transport

BLOCKS, BLOCK_KIB, SEED = 16, 64, 5


@pytest.mark.system
@pytest.mark.parametrize("name", TRANSPORTS)
def test_a_stopped_peer_holds_up_no_other(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    skip_unless_there(name)
    for module, limit in (
        (greeting, "GREETING_S"),
        (host_staged, "_REPLY_S"),
        (mooncake, "_GREETING_S"),
        (nixl_agent, "_PROBE_S"),
    ):
        monkeypatch.setattr(module, limit, 10 * DEADLINE_S)
    transport, shape = create_transport(name), layout(BLOCKS, BLOCK_KIB)
    pool = transport.allocate(shape)
    transport.register(pool, shape)
    reports: queue.Queue[PullerReport] = queue.Queue()
    puller = Puller(transport, reports.put)
    puller.start()

    def order(number: int, peer: str, source: Source) -> None:
        of = source.pool
        [pair] = make_plans([transport.layout], [of.layout])
        metadata, digest = of.transport_metadata, of.transport_metadata_digest
        puller.put(Connect(peer, metadata, digest, pair.plan))
        puller.put(Pull(number, peer, [(3, number)]))

    with sources(BLOCKS, BLOCK_KIB, SEED, name) as start:
        stopped, well = start(), start()
        assert stopped.process.pid is not None
        os.kill(stopped.process.pid, signal.SIGSTOP)
        order(1, "stopped", stopped)
        order(2, "well", well)
        try:
            done = reports.get(timeout=DEADLINE_S)
        finally:
            stopped.kill()
        assert isinstance(done, PullDone) and (done.order_id, done.error) == (2, "")
        assert (pool[2] == block_value(3, SEED)).all()
        if name == "host-staged":  # says nothing when the peer ends
            puller.stop()
            return
        failed = reports.get(timeout=DEADLINE_S)
        assert isinstance(failed, PeerFailed) and failed.peer == "stopped"
        lost = reports.get(timeout=DEADLINE_S)
        assert isinstance(lost, PullDone) and (lost.order_id, bool(lost.error)) == (1, True)
        puller.stop()


@pytest.mark.system
@pytest.mark.parametrize("name", TRANSPORTS)
def test_a_peer_that_was_left_before_it_answered_can_be_read_later(name: str) -> None:
    skip_unless_there(name)
    transport, shape = create_transport(name), layout(BLOCKS, BLOCK_KIB)
    pool = transport.allocate(shape)
    transport.register(pool, shape)
    with sources(BLOCKS, BLOCK_KIB, SEED, name) as start:
        source = start()
        assert source.process.pid is not None
        [pair] = make_plans([transport.layout], [source.pool.layout])
        metadata = source.pool.transport_metadata
        os.kill(source.process.pid, signal.SIGSTOP)
        assert not transport.reached("p", metadata, pair.plan)
        transport.disconnect("p")
        os.kill(source.process.pid, signal.SIGCONT)
        transport.connect("p", metadata, pair.plan)
        read = transport.post("p", [Run(3, 4, 1)])
        deadline_s = time.monotonic() + DEADLINE_S
        while not read.done():
            assert time.monotonic() < deadline_s
        assert (pool[4] == block_value(3, SEED)).all()


def test_kv_of_a_peer_that_cannot_be_connected_is_lost(rig: Rig) -> None:
    """As that of a peer that ends later: the router must not blame the decode worker alone."""
    prefill, decode = rig.worker(), rig.worker()

    def connect(*_: object) -> None:
        raise TransportError("it does not answer within 5 s")

    decode.transport.connect = connect  # type: ignore[method-assign]
    for number in range(3):
        rig.place(spec(f"r.{number}", prompt(8)), prefill, decode)
    rig.pump(lambda: len(decode.ended) == 3)
    for end in decode.ended.values():
        assert (end.reason, end.failure) == (LegEndReason.KV_LOST, FailureKind.TRANSPORT)
        assert "does not answer" in end.message
    for number in range(3):
        prefill.abort(f"r.{number}")
    rig.pump_until_idle()


class Slow:
    """Connections that are made when the test says so."""

    def __init__(self) -> None:
        self.may = threading.Event()
        self.ended: queue.Queue[str] = queue.Queue()
        self.reaching = Reaching(self.make, self.ended.put)

    def make(self, peer: str, metadata: bytes) -> str:
        assert self.may.wait(DEADLINE_S)
        if metadata == b"wrong":
            raise TransportError(f"{peer} has another key")
        return f"{peer} {metadata.decode()}"


def test_what_was_begun_is_taken() -> None:
    slow = Slow()
    assert not slow.reaching.done("p", b"1")
    assert not slow.reaching.done("q", b"wrong")
    slow.may.set()
    assert slow.reaching.take("p", b"1") == "p 1"
    with pytest.raises(TransportError, match="q has another key"):
        slow.reaching.take("q", b"wrong")
    assert slow.reaching.take("p", b"2") == "p 2", "nothing was begun"
    assert slow.ended.empty()


def test_what_nobody_takes_is_ended() -> None:
    slow = Slow()
    assert not slow.reaching.done("p", b"1")
    assert not slow.reaching.done("p", b"2"), "it is another process by now"
    slow.reaching.forget("p")
    slow.reaching.forget("p")
    slow.may.set()
    ended = {slow.ended.get(timeout=DEADLINE_S) for _ in range(2)}
    assert ended == {"p 1", "p 2"}


@pytest.mark.parametrize("name", ["kv-connect", "kv-tcp-receiver"])
def test_where_the_system_gives_no_thread_one_peer_is_not_reached(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    source = TcpSource("127.0.0.1", memoryview(bytes(64)), 0)
    place = ("127.0.0.1", source.port)
    reaching = Reaching(lambda peer, _: TcpPeer(peer, place, source.key), TcpPeer.end)
    start, started = threading.Thread.start, []

    def scarce(thread: threading.Thread) -> None:
        if thread.name == name:
            started.append(thread)
            if len(started) == (2 if name == "kv-tcp-receiver" else 1):
                raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", scarce)
    with pytest.raises(TransportError, match=r"no thread is left for .* p .*\(ulimit -u"):
        reaching.take("p", b"")
    for thread in started[:-1]:
        thread.join(DEADLINE_S)
        assert not thread.is_alive(), "its connection is left"
    reaching.take("p", b"").end()


class Step:
    """Connections that are made in steps, one for each letter of the metadata."""

    def __init__(self) -> None:
        self.ended: list[str] = []
        self.closed: list[str] = []
        self.joining = Joining(self.make, self.ended.append)

    def make(self, peer: str, metadata: bytes, plan: TransferPlan) -> Steps[str]:
        try:
            for letter in metadata:
                if letter == ord("!"):
                    raise TransportError(f"{peer} refuses")
                yield
        except GeneratorExit:
            self.closed.append(peer)
            raise
        return f"{peer} {metadata.decode()}"


@pytest.fixture
def plan() -> TransferPlan:
    shape = layout(BLOCKS, BLOCK_KIB)
    wire = shape.to_wire(shape.allocate(), transport="steps")
    [pair] = make_plans([wire], [wire])
    return pair.plan


def test_steps_are_taken_one_at_a_time(plan: TransferPlan) -> None:
    step = Step()
    assert [step.joining.done("p", b"ab", plan) for _ in range(4)] == [False, False, True, True]
    assert step.joining.take("p", b"ab", plan) == "p ab"
    assert step.joining.take("p", b"abc", plan) == "p abc", "nothing was begun"
    assert not step.joining.done("q", b"a!", plan)
    with pytest.raises(TransportError, match="q refuses"):
        step.joining.done("q", b"a!", plan)
    assert not step.joining.done("q", b"a!", plan), "begun anew"
    assert (step.ended, step.closed) == ([], [])


def test_steps_that_nobody_needs_end(plan: TransferPlan) -> None:
    step = Step()
    assert not step.joining.done("p", b"ab", plan)
    assert step.joining.done("p", b"", plan), "it is another process by now"
    assert (step.ended, step.closed) == ([], ["p"])
    for _ in range(2):
        step.joining.forget("p")
    assert (step.ended, step.closed) == (["p "], ["p"])
