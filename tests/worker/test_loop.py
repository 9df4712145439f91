"""The engine thread: what it passes on, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest

from tasuki.engine.api import (
    Leg,
    Output,
    RequestSpec,
    SamplingParams,
    StepResult,
    TokenLogprob,
)
from tasuki.engine.errors import GrammarError
from tasuki.engine.grammar import Grammar, GrammarSource
from tasuki.engine.prefix_cache import PrefixCache
from tasuki.engine.stats import EngineCounters
from tasuki.v1 import worker_pb2 as pb
from tasuki.worker import loop as loop_module
from tasuki.worker import sessions as sessions_module
from tasuki.worker.convert import role_at_start
from tasuki.worker.grammar_pool import GrammarPool
from tasuki.worker.loop import (
    Aborted,
    Closed,
    Command,
    EngineLoop,
    Opened,
    Resynced,
    Retargeted,
    RoleSet,
    Stop,
    Submitted,
    Wake,
)
from tasuki.worker.sessions import Session
from tasuki.worker.watchdog import Watchdog

DEADLINE_S = 60.0


class Engine:
    """Knows one request of two choices."""

    def __init__(self) -> None:
        self.choices = {0, 1}
        self.work = False
        self.cache = PrefixCache()
        self.submitted: list[RequestSpec] = []

    def submit(self, spec: RequestSpec, arrived_s: float) -> None:
        self.submitted.append(spec)

    def abort(self, request_id: str, choices: tuple[int, ...]) -> bool:
        self.choices -= set(choices)
        return not self.choices

    def due_in_s(self) -> float:
        return 0.0

    in_flight = False

    def counters(self) -> EngineCounters:
        return EngineCounters()

    def has_work(self) -> bool:
        return self.work

    def step(self, *, wait: bool) -> StepResult:
        raise RuntimeError("the device is gone")


class Handoffs:
    def __init__(self) -> None:
        self.aborted: list[str] = []
        self.peers: list[tuple[str, str, str]] = []

    def submit(self, spec: RequestSpec, peer_engine_id: str, peer_endpoint: str) -> None:
        self.peers.append((spec.request_id, peer_engine_id, peer_endpoint))

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def on_started(self, request_ids: Sequence[str]) -> None:
        pass

    def on_step(self, result: StepResult) -> None:
        pass

    def poll(self, now_s: float) -> None:
        pass

    def next_deadline(self) -> None:
        return None


@pytest.fixture
def no_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a change is reported, however long a busy machine takes."""
    monkeypatch.setattr(loop_module, "HEARTBEAT_S", 1e6)


class Loop(EngineLoop):
    reports = 0

    def _report(self) -> None:
        super()._report()
        self.reports += 1

    def _engine_load(self) -> pb.Load:
        return pb.Load()


class Compiler:
    """Compiles when it is told to."""

    def __init__(self) -> None:
        self.may = threading.Event()

    def compile(self, source: GrammarSource) -> Grammar:
        assert self.may.wait(DEADLINE_S)
        raise GrammarError(f"no {source.text}")


def no_grammars(compiler: Compiler | None = None) -> GrammarPool:
    any_compiler: Any = compiler or Compiler()
    return GrammarPool(any_compiler, threads=1)


def run(engine: Engine, *commands: Command) -> tuple[Handoffs, list[BaseException]]:
    inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
    for command in (*commands, Stop()):
        inbox.put(command)
    handoffs: Any = Handoffs()
    failures: list[BaseException] = []
    any_engine: Any = engine
    watchdog = Watchdog(lambda: 30.0, failures.append)
    info = pb.WorkerInfo(role=role_at_start("mixed"))
    loop = Loop(any_engine, handoffs, info, inbox, failures.append, watchdog, no_grammars())
    loop.start()
    loop.join(DEADLINE_S)
    assert not loop.is_alive()
    return handoffs, failures


@contextlib.asynccontextmanager
async def running(
    engine: Engine,
    *commands: Command,
    handoffs: Handoffs | None = None,
    watchdog: type[Watchdog] = Watchdog,
    grammars: GrammarPool | None = None,
) -> AsyncIterator[tuple[Loop, Callable[[Command], None]]]:
    """An engine thread that has these commands, and what gives it more; it ends without failure."""
    inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
    any_engine: Any = engine
    any_handoffs: Any = handoffs or Handoffs()
    failures: list[BaseException] = []
    watch, pool = watchdog(lambda: 30.0, failures.append), grammars or no_grammars()
    info = pb.WorkerInfo(role=role_at_start("mixed"))
    loop = Loop(any_engine, any_handoffs, info, inbox, failures.append, watch, pool)
    for command in commands:
        inbox.put(command)
    loop.start()
    yield loop, inbox.put
    inbox.put(Stop())
    await asyncio.to_thread(loop.join, DEADLINE_S)
    assert not failures and not loop.is_alive()


@pytest.mark.parametrize(
    ("aborts", "told"),
    [
        ([(0,)], []),
        ([(0, 1)], ["r"]),
        ([(0,), (1,)], ["r"]),
        ([()], ["r"]),
    ],
)
def test_handoffs_hear_when_nothing_of_a_request_goes_on(
    aborts: list[tuple[int, ...]], told: list[str]
) -> None:
    event_loop = asyncio.new_event_loop()
    try:
        session = Session(event_loop)
        handoffs, failures = run(Engine(), *(Aborted(session, "r", each) for each in aborts))
    finally:
        event_loop.close()
    assert not failures
    assert handoffs.aborted == told


def test_a_defect_is_reported_and_ends_the_thread() -> None:
    engine = Engine()
    engine.work = True
    event_loop = asyncio.new_event_loop()
    try:
        _, failures = run(engine, Opened(Session(event_loop)))
    finally:
        event_loop.close()
    assert [str(failure) for failure in failures] == ["the device is gone"]


def test_a_leg_whose_output_fits_into_no_message_is_aborted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sessions_module, "_MOST_SCORES_BYTES", 10)

    class Scoring(Engine):
        def step(self, *, wait: bool) -> StepResult:
            scores = [TokenLogprob(3, -1.0, 1, ())] * 20
            return StepResult(outputs=[Output("r", 0, 0, [5], prompt_logprobs=scores)])

    engine = Scoring()
    engine.work = True
    event_loop = asyncio.new_event_loop()
    try:
        session = Session(event_loop)
        spec = RequestSpec("r", Leg.COLOCATED, [1], SamplingParams(seed=1, max_tokens=9))
        handoffs, failures = run(engine, Opened(session), Submitted(session, spec, "", "", 0.0))
    finally:
        event_loop.close()
    assert not failures
    assert handoffs.aborted == ["r"]


def messages(session: Session) -> list[pb.WorkerMessage]:
    found = [session.queue.get_nowait() for _ in range(session.queue.qsize())]
    return [message for message in found if message is not None]


def test_a_role_of_an_older_epoch_is_ignored() -> None:
    async def case() -> list[tuple[str, int]]:
        session = Session(asyncio.get_running_loop())
        settings = [
            pb.RoleSetting(role=pb.ROLE_DECODE, owner="a", epoch=5),
            pb.RoleSetting(role=pb.ROLE_PREFILL, owner="b", epoch=4),
            pb.RoleSetting(role=pb.ROLE_PREFILL, owner="b", epoch=5),
            pb.RoleSetting(role=pb.ROLE_MIXED, owner="b", epoch=6),
        ]
        _, failures = run(Engine(), Opened(session), *(RoleSet(session, s) for s in settings))
        assert not failures
        await asyncio.sleep(0)
        roles = [m.info.role for m in messages(session) if m.HasField("info")]
        return [(role.owner, role.epoch) for role in roles]

    held = asyncio.run(case())
    assert held == [("start", 0), ("a", 5), ("a", 5), ("a", 5), ("b", 6)]


@pytest.mark.usefixtures("no_heartbeat")
def test_every_router_soon_knows_which_submits_the_load_counts() -> None:
    async def case() -> None:
        event_loop = asyncio.get_running_loop()
        asking, other = Session(event_loop), Session(event_loop)
        async with running(Engine(), Opened(asking), Opened(other)) as (_, put):
            spec = RequestSpec("r", Leg.COLOCATED, [1], SamplingParams(seed=0, max_tokens=1))
            put(Submitted(asking, spec, "", "", 0.0, number=7))
            applied: dict[Session, int] = {}
            async with asyncio.timeout(DEADLINE_S):
                for session in (asking, other):
                    while session not in applied or applied[asking] != 7:
                        message = await session.queue.get()
                        assert message is not None
                        if message.HasField("step"):
                            applied[session] = message.step.applied_submits
                assert applied == {asking: 7, other: 0}
                assert messages(asking) == []
                put(Wake())
                message = await asking.queue.get()
            assert message is not None and message.HasField("step")
        assert messages(asking) == []

    asyncio.run(case())


@pytest.mark.parametrize("hangs", [False, True])
def test_only_a_worker_whose_step_is_late_is_silent(
    hangs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watchdog counts the time for which an idle engine thread slept, too."""
    monkeypatch.setattr(loop_module, "HEARTBEAT_S", 0.01)

    class Late(Watchdog):
        late = True

    async def case() -> bool:
        session, engine = Session(asyncio.get_running_loop()), Engine()
        engine.in_flight = hangs
        async with running(engine, Opened(session), watchdog=Late) as (loop, _):
            async with asyncio.timeout(DEADLINE_S):
                while loop.reports < 3:
                    await asyncio.sleep(0.01)
        return any(message.HasField("step") for message in messages(session))

    assert asyncio.run(case()) is not hangs


@pytest.mark.usefixtures("no_heartbeat")
def test_every_router_soon_knows_what_the_prefix_cache_holds() -> None:
    def store(engine: Engine, *numbers: int) -> None:
        for number in numbers:
            engine.cache.insert(number.to_bytes(16, "little"), number, ends_chunk=True)

    async def told(session: Session) -> pb.KvEvents:
        async with asyncio.timeout(DEADLINE_S):
            while True:
                message = await session.queue.get()
                assert message is not None
                if message.step.HasField("kv"):
                    return message.step.kv

    async def case() -> None:
        event_loop = asyncio.get_running_loop()
        early, late = Session(event_loop), Session(event_loop)
        engine = Engine()
        store(engine, 1, 2)
        async with running(engine, Opened(early)) as (_, put):
            first = await told(early)
            assert (first.number, first.reset, sorted(first.held)) == (1, True, [1, 2])
            store(engine, 3)
            put(Opened(late))
            change = await told(early)
            assert (change.number, change.reset, change.stored) == (2, False, [3])
            whole = await told(late)
            assert (whole.number, whole.reset, sorted(whole.held)) == (1, True, [1, 2, 3])
            engine.cache.forget(1)
            put(Resynced(early))
            again = await told(early)
            assert (again.number, again.reset, sorted(again.held)) == (3, True, [2, 3])
            dropped = await told(late)
            assert (dropped.number, dropped.dropped) == (2, [1])

    asyncio.run(case())


GRAMMAR = GrammarSource("regex", "a+")


def constrained(session: Session, name: str, choices: tuple[int, ...] = (0,)) -> Submitted:
    params = SamplingParams(seed=0, max_tokens=1)
    spec = RequestSpec(name, Leg.PREFILL, [1], params, choices=choices)
    return Submitted(session, spec, "engine", "here:1", 0.0, grammar=GRAMMAR)


def test_a_leg_waits_for_its_grammar_and_others_do_not() -> None:
    """What comes while it waits holds: other peers, aborts of choices, of all, of a stream."""

    async def case() -> None:
        session, gone = Session(asyncio.get_running_loop()), Session(asyncio.get_running_loop())
        engine, compiler, handoffs = Engine(), Compiler(), Handoffs()
        free = RequestSpec("free", Leg.COLOCATED, [1], SamplingParams(seed=0, max_tokens=1))
        commands = (
            Opened(session),
            Opened(gone),
            constrained(session, "kept"),
            constrained(session, "moved"),
            constrained(session, "some", (0, 1, 2)),
            constrained(session, "aborted"),
            constrained(gone, "orphan"),
            Submitted(session, free, "", "", 0.0),
            Retargeted(session, "moved", "other", "there:2"),
            Aborted(session, "some", (1,)),
            Aborted(session, "aborted", ()),
            Closed(gone),
        )
        begun = running(engine, *commands, handoffs=handoffs, grammars=no_grammars(compiler))
        async with begun, asyncio.timeout(DEADLINE_S):
            ended: list[pb.LegEnd] = []
            load = pb.Load()
            while not ended:
                message = await session.queue.get()
                assert message is not None
                ended += message.step.ended
                load = message.step.load
            waiting = (load.waiting_requests, load.waiting_prefill_tokens)
            assert waiting == (4, 4), "orphan is there yet"
            ends = [(end.request_id, end.reason) for end in ended]
            assert ends == [("aborted", pb.LEG_END_ABORTED)]
            assert [spec.request_id for spec in engine.submitted] == ["free"]
            compiler.may.set()
            while len(engine.submitted) < 4:
                await asyncio.sleep(0.01)
        submitted = {spec.request_id: spec for spec in engine.submitted}
        assert sorted(submitted) == ["free", "kept", "moved", "some"]
        assert submitted["some"].choices == (0, 2)
        assert all(str(submitted[name].grammar) == "no a+" for name in ("kept", "moved", "some"))
        assert ("kept", "engine", "here:1") in handoffs.peers
        assert ("moved", "other", "there:2") in handoffs.peers

    asyncio.run(case())
