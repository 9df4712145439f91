"""Each router gets the tokens of its own requests, and only while its stream lives."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine

import pytest
from support import searches

from tasuki.engine.api import FinishReason, LegEnd, LegEndReason, LegTimings, Output, StepResult
from tasuki.v1 import worker_pb2 as pb
from tasuki.worker import sessions as sessions_module
from tasuki.worker.sessions import CacheFeed, Session, Sessions


def run(case: Callable[[], Coroutine[None, None, None]]) -> None:
    asyncio.run(asyncio.wait_for(case(), timeout=10))


def output(request_id: str, token: int) -> Output:
    return Output(request_id=request_id, choice=0, position=0, tokens=[token])


async def received(session: Session) -> list[pb.StepReport]:
    await asyncio.sleep(0)  # let call_soon_threadsafe deliver
    return [session.queue.get_nowait().step for _ in range(session.queue.qsize())]


def test_a_step_is_split_by_stream() -> None:
    async def case() -> None:
        loop = asyncio.get_running_loop()
        sessions, a, b = Sessions(), Session(loop), Session(loop)
        for session in (a, b):
            sessions.open(session)
        assert sessions.bind("r1", a) and sessions.bind("r2", b) and sessions.bind("r3", a)
        result = StepResult(outputs=[output("r1", 1), output("r2", 2), output("r3", 3)])
        sessions.publish(7, result, pb.Load(free_blocks=5))
        (of_a,), (of_b,) = await received(a), await received(b)
        assert [(o.request_id, list(o.tokens)) for o in of_a.outputs] == [("r1", [1]), ("r3", [3])]
        assert [(o.request_id, list(o.tokens)) for o in of_b.outputs] == [("r2", [2])]
        assert of_a.step == 7 and of_b.load.free_blocks == 5

    run(case)


def test_each_router_gets_a_changed_load_once_with_its_own_applied_submits() -> None:
    async def case() -> None:
        loop = asyncio.get_running_loop()
        sessions, a, b = Sessions(), Session(loop), Session(loop)
        for session in (a, b):
            sessions.open(session)
        sessions.bind("r1", a)
        a.applied, b.applied = 3, 1
        sessions.load_changed()
        sessions.publish(1, StepResult(outputs=[output("r1", 5)]), pb.Load(free_blocks=5))
        loads = iter([pb.Load(free_blocks=4)])
        for _ in range(3):  # the second and third find nobody behind, and ask for no load
            sessions.publish_load(2, lambda: next(loads))
        (of_a,), (of_b,) = await received(a), await received(b)
        assert (of_a.load.free_blocks, of_a.applied_submits) == (5, 3)
        assert (of_b.load.free_blocks, of_b.applied_submits) == (4, 1)

    run(case)


def test_the_youngest_answers_come_first() -> None:
    async def case() -> None:
        sessions, session = Sessions(), Session(asyncio.get_running_loop())
        sessions.open(session)
        steps = {"old": 900, "older": 901, "new": 1, "newest": 0, "as old": 900}
        outputs = []
        for request_id, position in steps.items():
            sessions.bind(request_id, session)
            outputs.append(Output(request_id, choice=0, position=position, tokens=[7]))
        sessions.publish(1, StepResult(outputs=outputs), pb.Load())
        (report,) = await received(session)
        order = [each.request_id for each in report.outputs]
        assert order == ["newest", "new", "old", "as old", "older"]

    run(case)


def test_after_its_end_a_request_is_nobodys() -> None:
    async def case() -> None:
        sessions, session = Sessions(), Session(asyncio.get_running_loop())
        sessions.open(session)
        sessions.bind("r1", session)
        timings = LegTimings(transfer_s=0.5, transfer_bytes=64)
        ended = LegEnd("r1", LegEndReason.FINISHED, timings=timings)
        sessions.publish(1, StepResult(ended=[ended]), pb.Load())
        sessions.publish(2, StepResult(outputs=[output("r1", 9)]), pb.Load())
        (report,) = await received(session)
        assert report.ended[0].reason == pb.LEG_END_FINISHED
        assert report.ended[0].timings.transfer_bytes == 64
        assert sessions.close(session) == set()

    run(case)


def test_closing_a_stream_names_what_still_runs() -> None:
    async def case() -> None:
        sessions, session = Sessions(), Session(asyncio.get_running_loop())
        sessions.open(session)
        sessions.bind("r1", session)
        assert not sessions.bind("r1", session), "an id in use must not run twice"
        assert sessions.close(session) == {"r1"}
        assert not sessions.bind("r2", session), "a request whose stream is gone must not run"

    run(case)


def test_a_second_router_with_the_same_id_is_told_that_its_leg_is_over() -> None:
    async def case() -> None:
        loop = asyncio.get_running_loop()
        sessions, a, b = Sessions(), Session(loop), Session(loop)
        for session in (a, b):
            sessions.open(session)
        assert sessions.bind("r1", a)
        assert not sessions.bind("r1", b)
        assert not sessions.bind("r1", a)
        (told,) = await received(b)
        assert [(e.request_id, e.reason) for e in told.ended] == [("r1", pb.LEG_END_FAILED)]
        assert "in use" in told.ended[0].message
        assert await received(a) == [], "a repeated submit must not end the leg that runs"
        assert sessions.close(b) == set()
        assert sessions.close(a) == {"r1"}

    run(case)


def test_the_last_token_of_a_stopped_choice_is_named() -> None:
    async def case() -> None:
        sessions, session = Sessions(), Session(asyncio.get_running_loop())
        sessions.open(session)
        sessions.bind("r1", session)
        stopped = Output("r1", 2, 5, [11, 2], finish=FinishReason.STOP)
        sessions.publish(1, StepResult(outputs=[stopped]), pb.Load())
        (report,) = await received(session)
        (sent,) = report.outputs
        assert (sent.choice, sent.position, sent.finish) == (2, 5, pb.FINISH_STOP)
        assert sent.stop_token_id == 2

    run(case)


def test_a_request_is_changed_by_its_own_router_alone() -> None:
    async def case() -> None:
        loop = asyncio.get_running_loop()
        sessions, a, b = Sessions(), Session(loop), Session(loop)
        for session in (a, b):
            sessions.open(session)
        sessions.bind("r1", a)
        assert sessions.may_change("r1", a) and not sessions.may_change("r1", b)
        assert sessions.may_change("ended", b)
        (of_b,) = await received(b)
        assert "in use by another router" in of_b.ended[0].message
        assert not await received(a)

    run(case)


class Router:
    """Applies messages; knows nothing before a reset and nothing after a gap."""

    def __init__(self) -> None:
        self.held: set[int] = set()
        self.number = 0

    def take(self, events: pb.KvEvents) -> None:
        assert events.number == self.number + 1
        self.number = events.number
        assert events.reset or self.number > 1, "the first message begins with a reset"
        if events.reset:
            self.held.clear()
        assert not set(events.stored) & set(events.dropped)
        self.held -= set(events.dropped)
        self.held |= {*events.stored, *events.held}


def drain(feed: CacheFeed, router: Router) -> None:
    while (events := feed.take()) is not None:
        assert len(events.stored) + len(events.dropped) + len(events.held) <= (
            sessions_module.MOST_A_REPORT
        )
        router.take(events)
    assert not feed.is_behind


@pytest.mark.search
@pytest.mark.parametrize("seed", searches.seeds(200))
def test_a_drained_feed_has_told_the_cache(seed: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sessions_module, "MOST_A_REPORT", 7)
    with searches.case(seed):
        rng = random.Random(seed)
        cache: set[int] = set(rng.sample(range(60), 20))
        feed, router = CacheFeed(), Router()
        feed.reset(cache)
        for _ in range(rng.randint(1, 80)):
            happening = rng.random()
            if happening < 0.5:
                changes = {rng.randrange(60): rng.random() < 0.6 for _ in range(rng.randint(1, 9))}
                for name, held in changes.items():
                    (cache.add if held else cache.discard)(name)
                feed.change(changes)
            elif happening < 0.9:
                if (events := feed.take()) is not None:
                    router.take(events)
            elif happening < 0.95:
                feed.reset(cache)
        drain(feed, router)
        assert router.held == cache


def test_changes_come_before_what_was_held(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sessions_module, "MOST_A_REPORT", 3)
    feed = CacheFeed()
    feed.reset([5, 6, 7, 8])
    feed.change({9: True, 6: False})
    first, second = feed.take(), feed.take()
    assert first is not None and second is not None
    assert (first.reset, first.stored, first.dropped, first.held) == (True, [9], [6], [5])
    assert (second.number, second.reset, second.held) == (2, False, [7, 8])
    assert feed.take() is None


def test_a_feed_that_is_not_taken_asks_for_a_reset(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sessions_module, "MOST_PENDING", 10)
    feed = CacheFeed()
    feed.reset([])
    feed.change(dict.fromkeys(range(10), True))
    assert not feed.overflows
    feed.change({10: True})
    assert feed.overflows
    feed.reset([1])
    assert not feed.overflows
