"""Threads for work that may never end, and can be left behind then. No torch.

Masks of some grammars take the library for ever (seen with Lark), and nothing can interrupt
it. The engine thread therefore has them computed here, waits, and goes on without what
takes too long. A thread that is left behind is replaced, a few times only: each of them
occupies a core until its task ends, if it ever does.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable, Sequence

from llguidance import LLExecutor

from tasuki.engine.errors import GrammarBusyError, GrammarError

log = logging.getLogger(__name__)

LIMIT_S = 2.0
"""Without any task's end, the running ones are left behind. Usual masks take below 1 ms."""
_MOST_THREADS = 8
_MOST_LEFT_BEHIND = 16

Task = Callable[[], None]


class StuckError(GrammarError):
    """A grammar's next tokens could not be found in time."""


class _Batch:
    """Tasks that are waited for together; the lock guards all of it."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.tasks = tasks
        self.results: list[Exception | None] = [None] * len(tasks)
        self.waiting = set(range(len(tasks)))
        self.running: set[int] = set()
        self.left = len(tasks)
        self.lock = threading.Lock()
        self.progress = threading.Semaphore(0)  # once for each task that ends


class MaskThreads:
    """Runs tasks side by side. One thread calls it.

    Args:
        limit_s: See `LIMIT_S`.
        threads: At once.
        most_left_behind: While so many run on, nothing else is run.
    """

    def __init__(
        self,
        limit_s: float = LIMIT_S,
        threads: int | None = None,
        most_left_behind: int = _MOST_LEFT_BEHIND,
    ) -> None:
        self._limit_s = limit_s
        self._num_threads = threads or min(_MOST_THREADS, os.cpu_count() or 1)
        self._most_left_behind = most_left_behind
        self._queue: queue.SimpleQueue[tuple[_Batch, int]] = queue.SimpleQueue()
        self._left_behind = 0  # tasks that run on
        self._lock = threading.Lock()  # of that number
        self._started = False
        self._executor: LLExecutor | None = None

    @property
    def longest_s(self) -> float:
        """How long a step's masks may take: all in one call, then the most that get stuck."""
        return self._limit_s * (1 + -(-self._most_left_behind // self._num_threads))

    @property
    def executor(self) -> LLExecutor:
        """The library's own threads, for tasks to use."""
        if self._executor is None:
            self._executor = LLExecutor()
        return self._executor

    def leave_executor(self) -> None:
        """Leave the executor to a call that does not end, and make another one when needed."""
        self._executor = None

    def run(self, tasks: Sequence[Task]) -> list[Exception | None]:
        """Run the tasks, and wait for them.

        Returns:
            What each raised; `StuckError`: it still runs, so leave alone what it uses;
            `GrammarBusyError`: it was not begun.
        """
        if self._left_behind >= self._most_left_behind:
            return [self._busy()] * len(tasks)
        if not self._started:
            self._started = True
            self._start(self._num_threads)
        batch = _Batch(tasks)
        for index in range(len(tasks)):
            self._queue.put((batch, index))
        while batch.left:
            if not batch.progress.acquire(timeout=self._limit_s):
                self._leave_behind(batch)
        return batch.results

    def _busy(self) -> GrammarBusyError:
        return GrammarBusyError(f"{self._left_behind} grammars are stuck here: restart this worker")

    def _leave_behind(self, batch: _Batch) -> None:
        with batch.lock:
            stuck = list(batch.running)
            batch.running.clear()
            batch.left -= len(stuck)
            for index in stuck:
                batch.results[index] = StuckError(
                    f"the next tokens that the grammar allows were not found within"
                    f" {self._limit_s:g} s: make it simpler"
                )
            with self._lock:
                self._left_behind += len(stuck)
            if self._left_behind >= self._most_left_behind:
                for index in batch.waiting:
                    batch.results[index] = self._busy()
                batch.left -= len(batch.waiting)
                batch.waiting.clear()
        log.error("%d grammars are stuck, each on a core of its own", self._left_behind)
        self._start(len(stuck))

    def _start(self, count: int) -> None:
        for _ in range(count):
            threading.Thread(target=self._work, name="masks", daemon=True).start()

    def _work(self) -> None:
        while True:
            batch, index = self._queue.get()
            with batch.lock:
                if index not in batch.waiting:
                    continue  # given up
                batch.waiting.remove(index)
                batch.running.add(index)
            error: Exception | None = None
            try:
                batch.tasks[index]()
            except Exception as raised:
                error = raised
            except BaseException as panic:  # of the library: no `Exception`
                error = GrammarError(f"the grammar library ended by {panic!r}")
            with batch.lock:
                if index not in batch.running:  # left behind, and replaced
                    with self._lock:
                        self._left_behind -= 1
                    return
                batch.running.remove(index)
                batch.results[index] = error
                batch.left -= 1
            batch.progress.release()
