"""Peers that do not answer hold up their own orders alone; connections that nobody takes end."""

from __future__ import annotations

import os
import queue
import signal
import threading

import pytest
from kv_source_process import DEADLINE_S, Source, block_value, layout, sources

from tasuki.kv import greeting
from tasuki.kv.effects import Pull, PullDone
from tasuki.kv.puller import Connect, PeerFailed, Puller, PullerReport
from tasuki.kv.reaching import Reaching
from tasuki.kv.transfer_plan import make_plans
from tasuki.kv.transport import TransportError, create_transport

BLOCKS, BLOCK_KIB, SEED = 16, 64, 5


@pytest.mark.system
@pytest.mark.parametrize("name", ["tcp", "shm"])
def test_a_stopped_peer_holds_up_no_other(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(greeting, "GREETING_S", 20.0)
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
        done = reports.get(timeout=DEADLINE_S)
        stopped.kill()
        assert isinstance(done, PullDone) and (done.order_id, done.error) == (2, "")
        assert (pool[2] == block_value(3, SEED)).all()
        failed = reports.get(timeout=DEADLINE_S)
        assert isinstance(failed, PeerFailed) and failed.peer == "stopped"
        lost = reports.get(timeout=DEADLINE_S)
        assert isinstance(lost, PullDone) and "cannot be reached" in lost.error
        puller.stop()


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
