"""The watchdog: what counts as progress, and what as a hang."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

import tasuki.worker.watchdog as module
from tasuki.worker.watchdog import StuckError, Watchdog

Turn = Callable[[Watchdog, int], None]


def ticks_until_stuck(
    monkeypatch: pytest.MonkeyPatch, limit_ticks: int, turn: Turn, most: int = 100
) -> int | None:
    """Ticks until the watchdog gives the engine up; None: not in `most` ticks.

    Args:
        turn: What the engine thread does between two ticks.
    """
    monkeypatch.setattr(module, "_TICK_S", 1.0)
    monkeypatch.setattr(module.faulthandler, "dump_traceback", lambda *_, **__: None)
    errors: list[StuckError] = []
    watchdog = Watchdog(lambda: float(limit_ticks), errors.append)
    ticks = 0

    class Ticks(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            nonlocal ticks
            ticks += 1
            turn(watchdog, ticks)
            return ticks > most

    watchdog._stopped = Ticks()
    watchdog.run()
    assert not errors or "--step-timeout-s" in str(errors[0])
    return ticks if errors else None


def test_a_call_that_does_not_return_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is said between the first tick and the last: the first one is progress."""

    def turn(watchdog: Watchdog, tick: int) -> None:
        pass

    assert ticks_until_stuck(monkeypatch, 9, turn) == 10


def test_asking_for_a_step_that_does_not_end_is_not_progress(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def turn(watchdog: Watchdog, tick: int) -> None:
        watchdog.progress(steps=3, in_flight=True)

    assert ticks_until_stuck(monkeypatch, 9, turn) == 10


@pytest.mark.parametrize("in_flight", [False, True])
def test_idle_turns_and_steps_that_end_are_progress(
    monkeypatch: pytest.MonkeyPatch, in_flight: bool
) -> None:
    def turn(watchdog: Watchdog, tick: int) -> None:
        watchdog.progress(steps=tick // 8 if in_flight else 0, in_flight=in_flight)

    assert ticks_until_stuck(monkeypatch, 9, turn) is None


def test_an_engine_is_late_before_it_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    late: list[int] = []

    def turn(watchdog: Watchdog, tick: int) -> None:
        if watchdog.late:
            late.append(tick)

    assert ticks_until_stuck(monkeypatch, 9, turn) == 10
    assert late[0] == 6
