"""Asyncio work that nobody waits for: what escapes from it reaches the loop's exception handler.

Such work is essential: in a worker the handler ends the process (worker/failures.py).
Without this the exception would stay in the task, unseen, and its work undone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

FAILED_TASK = "background work failed"


def start(
    work: Coroutine[object, object, None], name: str, *expected: type[BaseException]
) -> asyncio.Task[None]:
    """Run `work` as a task of the running loop.

    Args:
        work: Ends by itself or when it is cancelled.
        name: For the log.
        expected: What it may end with in normal operation, such as a broken stream.
    """
    task = asyncio.ensure_future(work)

    def on_end(ended: asyncio.Task[None]) -> None:
        error = None if ended.cancelled() else ended.exception()
        if error is not None and not isinstance(error, expected):
            _report(ended.get_loop(), name, error)

    task.add_done_callback(on_end)
    return task


def call(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *args: object) -> None:
    """Call a function in `loop`, from any thread, without waiting for it.

    Raises:
        RuntimeError: The loop is closed.
    """

    def run() -> None:
        try:
            function(*args)
        except Exception as error:
            _report(loop, function.__qualname__, error)

    loop.call_soon_threadsafe(run)


def _report(loop: asyncio.AbstractEventLoop, name: str, error: BaseException) -> None:
    loop.call_exception_handler({"message": FAILED_TASK, "name": name, "exception": error})
