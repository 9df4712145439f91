"""Work that nobody waits for: its failures reach the loop's exception handler."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from tasuki import background


async def fail(error: BaseException) -> None:
    raise error


def heard(*work: Coroutine[Any, Any, None], expected: type[BaseException] = OSError) -> list[str]:
    """What the loop's exception handler is told while the tasks run."""
    told: list[str] = []

    async def case() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(
            lambda _, c: told.append(f"{c['message']}, {c['name']}: {c['exception']!r}")
        )
        tasks = [background.start(each, "task", expected) for each in work]
        await asyncio.wait(tasks)
        await asyncio.sleep(0)

    asyncio.run(case())
    return told


def test_a_defect_is_heard_while_the_task_is_still_held() -> None:
    assert heard(fail(KeyError("k"))) == [f"{background.FAILED_TASK}, task: KeyError('k')"]


@pytest.mark.parametrize("error", [ConnectionError("gone"), asyncio.CancelledError()])
def test_what_is_expected_ends_quietly(error: BaseException) -> None:
    assert heard(fail(error)) == []


def test_a_call_that_raises_is_heard() -> None:
    told: list[BaseException] = []

    def broken(number: int) -> None:
        raise ValueError(number)

    async def case() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: told.append(context["exception"]))
        background.call(loop, broken, 7)
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    asyncio.run(case())
    assert [repr(error) for error in told] == ["ValueError(7)"]
