"""When a worker that was told to end may end."""

from __future__ import annotations

import asyncio
import queue
import signal
from collections.abc import Callable, Coroutine

import pytest
from whole_worker import Router, WholeWorker, submit

from tasuki.v1 import worker_pb2 as pb
from tasuki.worker.drain import NOTICE_S, Drain, Held
from tasuki.worker.loop import Command, DrainOrdered
from tasuki.worker.shutdown import Shutdown

NOTHING = Held(routers=0, legs=0, leased_blocks=0)


def test_it_may_end_when_nothing_is_left() -> None:
    drain = Drain(begun_s=10.0)
    assert drain.may_end(10.0, NOTHING), "without routers nothing can arrive"
    later_s = 10.0 + NOTICE_S
    assert drain.next_look_s(10.0) == later_s
    assert drain.next_look_s(later_s) > later_s
    one_router = Held(routers=1, legs=0, leased_blocks=0)
    assert not drain.may_end(later_s - 0.1, one_router), "a submit may be on its way"
    assert drain.may_end(later_s, one_router)
    for held in (Held(1, 1, 0), Held(1, 0, 1), Held(0, 0, 1)):
        assert not drain.may_end(later_s + 100.0, held), held


class Signals:
    """A `Shutdown` that gets signals by calls."""

    def __init__(self, drain_s: float) -> None:
        self.events: list[str] = []
        self.inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self.shutdown = Shutdown(
            asyncio.get_running_loop(),
            self.inbox,
            drain_s,
            on_drain=lambda: self.events.append("drain"),
            finish=lambda: self.events.append("finish"),
        )


def drained_by(order: Command) -> Callable[[], None]:
    assert isinstance(order, DrainOrdered)
    return order.on_drained


def run(case: Callable[[], Coroutine[None, None, None]]) -> None:
    asyncio.run(asyncio.wait_for(case(), timeout=120))


async def until(holds: Callable[[], object]) -> None:
    while not holds():
        await asyncio.sleep(0.001)


def test_the_first_signal_drains_and_the_second_one_ends() -> None:
    async def case() -> None:
        signals = Signals(drain_s=600.0)
        signals.shutdown.listen()
        signal.raise_signal(signal.SIGTERM)
        await until(lambda: signals.events)
        assert signals.events == ["drain"]
        assert signals.inbox.qsize() == 1
        signal.raise_signal(signal.SIGINT)
        await until(lambda: signals.events != ["drain"])
        assert signals.events == ["drain", "finish"]

    run(case)


def test_orders_of_other_hosts_drain_once_and_a_signal_still_ends() -> None:
    async def case() -> None:
        signals = Signals(drain_s=600.0)
        for _ in range(2):
            signals.shutdown.drain()
        assert signals.events == ["drain"]
        assert signals.inbox.qsize() == 1
        signals.shutdown.on_signal()
        assert signals.events == ["drain", "finish"]
        at_once = Signals(drain_s=0.0)
        at_once.shutdown.drain()
        assert at_once.events == ["finish"]

    run(case)


def test_the_drain_ends_when_nothing_is_left_or_at_its_limit() -> None:
    async def case() -> None:
        drained = Signals(drain_s=600.0)
        drained.shutdown.on_signal()
        drained_by(drained.inbox.get_nowait())()
        await until(lambda: "finish" in drained.events)
        late = Signals(drain_s=0.001)
        late.shutdown.on_signal()
        await until(lambda: "finish" in late.events)
        at_once = Signals(drain_s=0.0)
        at_once.shutdown.on_signal()
        assert at_once.events == ["finish"]
        assert at_once.inbox.empty()

    run(case)


def test_a_draining_worker_says_so_and_waits_for_its_legs_and_routers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tasuki.worker.drain.NOTICE_S", 1e6)

    async def case() -> None:
        worker = WholeWorker()
        await worker.start()
        router = Router(worker)
        ended: list[str] = []
        try:
            long = await router.submit(submit("long", [1, 2, 3], max_tokens=60))
            await until(lambda: long.tokens)
            assert not router.draining
            worker.put(DrainOrdered(lambda: ended.append("drained")))
            await until(lambda: router.draining)
            # It crossed with the news, and is computed like the first one.
            late = await router.submit(submit("late", [4, 5], max_tokens=2))
            for leg in (long, late):
                assert (await leg.end()).reason == pb.LEG_END_FINISHED
            await worker.until_idle()
            assert not ended, "routers have had no time to hear"
            await router.close()
            await until(lambda: ended)
            assert ended == ["drained"]
        finally:
            await router.close()
            await worker.stop()
        assert worker.failures == []

    run(case)


def test_with_its_routers_gone_an_idle_worker_does_not_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tasuki.worker.drain.NOTICE_S", 1e6)

    async def case() -> None:
        worker = WholeWorker()
        await worker.start()
        drained = asyncio.Event()
        loop = asyncio.get_running_loop()
        try:
            worker.put(DrainOrdered(lambda: loop.call_soon_threadsafe(drained.set)))
            await drained.wait()
        finally:
            await worker.stop()

    run(case)
