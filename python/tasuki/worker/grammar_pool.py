"""Compiles grammars on threads of its own, and keeps those of late.

    engine thread ──get──▶ cache ──▶ told at once
                             └─▶ queue ──▶ compiling threads ──▶ told, and cached

A grammar takes from a millisecond to seconds, and recurses: the threads have a large stack.
A compilation cannot be stopped. One that takes longer than the limit is refused meanwhile,
and the refusal is kept, so the same text does not occupy a second thread. A thread that is
late is replaced, a few times only, for each occupies a core. What has waited for a thread for
that long is no fault of the grammar: it may be compiled elsewhere, and here later.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from tasuki.engine.errors import GrammarBusyError, GrammarError
from tasuki.engine.grammar import Grammar, GrammarCompiler, GrammarSource

log = logging.getLogger(__name__)

COMPILE_LIMIT_S = 10.0
"""From the request's arrival, so the wait for a thread counts."""
_THREADS = 4
_MOST_REPLACED = 8
_KEPT = 128
# What `MAX_SOURCE_BYTES` of the deepest grammars take, twice. Only touched pages cost memory.
_STACK_BYTES = 512 << 20

# The size is the process's: from here on until the threads are there.
_STACK_SIZE = threading.Lock()

Compiled = Grammar | GrammarError
Told = Callable[[Compiled], None]


class GrammarPool:
    """Grammars of one worker; any thread.

    Args:
        compiler: Compiles one.
        limit_s: After so long a grammar is refused, or turned away if no thread has begun it.
        threads: How many compile at once.
        kept: How many grammars, or refusals, are remembered.
    """

    def __init__(
        self,
        compiler: GrammarCompiler,
        limit_s: float = COMPILE_LIMIT_S,
        threads: int = _THREADS,
        kept: int = _KEPT,
    ) -> None:
        self._compiler = compiler
        self._limit_s = limit_s
        self._num_threads = threads
        self._kept = kept
        self._lock = threading.Lock()
        self._cache: OrderedDict[GrammarSource, Compiled] = OrderedDict()
        self._waiting: dict[GrammarSource, list[Told]] = {}
        self._queue: queue.SimpleQueue[GrammarSource] = queue.SimpleQueue()
        self._deadlines: queue.SimpleQueue[tuple[float, GrammarSource, list[Told]]] = (
            queue.SimpleQueue()
        )
        self._running: set[GrammarSource] = set()
        self._late: set[GrammarSource] = set()  # running on threads that are replaced
        self._replaced = 0
        self._started = False

    def get(self, source: GrammarSource, told: Told) -> None:
        """Have `told` called with the grammar or why there is none: at once, or from a thread."""
        with self._lock:
            compiled = self._cache.get(source)
            if compiled is None:
                waiting = self._waiting.setdefault(source, [])
                waiting.append(told)
                if len(waiting) == 1:
                    self._begin(source, waiting)
                return
            self._cache.move_to_end(source)
        if isinstance(compiled, Grammar) and compiled.stuck is not None:
            compiled = compiled.stuck
        told(compiled)

    def _begin(self, source: GrammarSource, waiting: list[Told]) -> None:
        if not self._started:
            self._started = True
            self._start_threads(self._num_threads)
            threading.Thread(target=self._watch, name="grammar-limit", daemon=True).start()
        self._deadlines.put((time.monotonic() + self._limit_s, source, waiting))
        self._queue.put(source)

    def _start_threads(self, count: int) -> None:
        with _STACK_SIZE:
            before = threading.stack_size(_STACK_BYTES)
            try:
                for _ in range(count):
                    threading.Thread(target=self._run, name="grammar", daemon=True).start()
            finally:
                threading.stack_size(before)

    def _watch(self) -> None:
        while True:  # all have the same limit, so the first to come is the first to be late
            deadline_s, source, waiting = self._deadlines.get()
            time.sleep(max(0.0, deadline_s - time.monotonic()))
            self._expire(source, waiting)

    def _run(self) -> None:
        while True:
            source = self._queue.get()
            with self._lock:
                if source not in self._waiting:
                    continue  # refused while it waited for a thread
                self._running.add(source)
            try:
                compiled: Compiled = self._compiler.compile(source)
            except GrammarError as error:
                compiled = error
            except BaseException as error:  # a panic of the library is no `Exception`
                log.exception("compiling a grammar raised")
                compiled = GrammarError(f"the {source.kind} is refused: compiling raised {error!r}")
            self._settle(source, compiled)
            with self._lock:
                self._running.discard(source)
                if source in self._late:
                    self._late.remove(source)
                    return

    def _expire(self, source: GrammarSource, waiting: list[Told]) -> None:
        with self._lock:
            if self._waiting.get(source) is not waiting:
                return  # it is settled
            begun = source in self._running
            if not begun:
                del self._waiting[source]
            late = begun and self._replaced < _MOST_REPLACED
            if late:
                self._late.add(source)
                self._replaced += 1
        if not begun:
            busy = GrammarBusyError(
                f"no thread was free for the {source.kind} within {self._limit_s:g} s: this worker"
                " compiles too many others"
            )
            log.warning("a grammar is turned away: %s", busy)
            for told in waiting:
                told(busy)
            return
        if late:
            self._start_threads(1)
        message = (
            f"the {source.kind} of {len(source.text)} characters did not compile within"
            f" {self._limit_s:g} s: make it smaller"
        )
        self._settle(source, GrammarError(message))

    def _settle(self, source: GrammarSource, compiled: Compiled) -> None:
        """Remember a result, and tell those that wait; a result that comes late is only kept."""
        with self._lock:
            late = source not in self._waiting
            if late and isinstance(compiled, GrammarError):
                return
            self._cache[source] = compiled
            self._cache.move_to_end(source)
            while len(self._cache) > self._kept:
                self._cache.popitem(last=False)
            waiting = self._waiting.pop(source, [])
        if isinstance(compiled, GrammarError):
            log.warning("a grammar is refused: %s", compiled)
        for told in waiting:
            told(compiled)
