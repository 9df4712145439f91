"""The engine thread: what it passes on, and how it ends."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Sequence
from typing import Any

import pytest

from tasuki.engine.api import StepResult
from tasuki.engine.stats import EngineCounters
from tasuki.v1 import worker_pb2 as pb
from tasuki.worker.loop import Aborted, Command, EngineLoop, Opened, Stop
from tasuki.worker.sessions import Session
from tasuki.worker.watchdog import Watchdog


class Engine:
    """Knows one request of two choices."""

    def __init__(self) -> None:
        self.choices = {0, 1}
        self.work = False

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

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def on_started(self, request_ids: Sequence[str]) -> None:
        pass

    def poll(self, now_s: float) -> None:
        pass

    def next_deadline(self) -> None:
        return None


class Loop(EngineLoop):
    def _load(self) -> pb.Load:
        return pb.Load()


def run(engine: Engine, *commands: Command) -> tuple[Handoffs, list[BaseException]]:
    inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
    for command in (*commands, Stop()):
        inbox.put(command)
    handoffs: Any = Handoffs()
    failures: list[BaseException] = []
    any_engine: Any = engine
    watchdog = Watchdog(lambda: 30.0, failures.append)
    loop = Loop(any_engine, handoffs, pb.WorkerInfo(), inbox, failures.append, watchdog)
    loop.start()
    loop.join(10)
    assert not loop.is_alive()
    return handoffs, failures


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
    handoffs, failures = run(Engine(), *(Aborted("r", choices) for choices in aborts))
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
