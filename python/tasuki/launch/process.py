"""One child process: started in its own session, its output copied line by line.

Threads: the launcher's main thread signals children; per child, one thread copies
the output, and one starts the child and waits for its end. They tell the main
thread through a queue and share the process alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import BinaryIO

from tasuki.launch.forking import Process, Starter, spawn
from tasuki.launch.topology import ProcessSpec

_TAIL_LINES = 30
_DRAIN_OUTPUT_S = 1.0


@dataclass(frozen=True, slots=True)
class Ready:
    """The child has said that it is ready, and where."""

    child: Child
    address: str


@dataclass(frozen=True, slots=True)
class Exited:
    """The child has ended.

    Attributes:
        child: Which one.
        code: Negative for a signal, as in `subprocess`.
        how: The same in words, or why it could not be started.
    """

    child: Child
    code: int
    how: str


@dataclass(frozen=True, slots=True)
class ChildIo:
    """Where a child's output and news go.

    Attributes:
        log_path: Every line is appended here.
        echo: Called with each line that is not the ready line.
        post: Takes `Ready` and `Exited`, from any thread.
    """

    log_path: Path
    echo: Callable[[str], None]
    post: Callable[[Ready | Exited], None]


class Child:
    """One incarnation of a process.

    Attributes:
        spec: What was started.
        started_s: When, on the monotonic clock.
        tail: Its last lines of output.
    """

    def __init__(self, spec: ProcessSpec, io: ChildIo, start: Starter = spawn) -> None:
        """Have it started by `start`, which may take as long as an import.

        Where there is no thread or descriptor for it, it has ended at once.
        """
        self.spec = spec
        self.started_s = time.monotonic()
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._io = io
        self._start = start
        self._lock = threading.Lock()  # guards the two below
        self._process: Process | None = None
        self._pending: signal.Signals | None = None  # sent before it was started
        self._begun = threading.Event()
        try:
            self._begin()
        except OSError as error:
            self._cannot_start(error)

    @property
    def where(self) -> str:
        """See `Process`; empty before it is started."""
        return "" if self._process is None else self._process.where

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the whole process group; nothing happens if it is gone."""
        with self._lock:
            if self._process is None:
                self._pending = number
                return
        self._process.signal(number)

    def _begin(self) -> None:
        with contextlib.ExitStack() as opened:
            log = opened.enter_context(_open_log(self._io.log_path))
            read, write = os.pipe()
            opened.callback(os.close, write)
            output = opened.enter_context(open(read, "rb"))
            self._copier = _thread(f"{self.spec.name}-output", self._copy, output, log)
            opened.pop_all()  # the threads close them
        try:
            _thread(f"{self.spec.name}-wait", self._run, write)
        except OSError:
            os.close(write)  # ends the copier
            self._begun.set()
            raise

    def _cannot_start(self, error: OSError) -> None:
        why = f"cannot start it: {error}"
        self.tail.append(why)
        self._begun.set()
        self._io.post(Exited(self, 1, why))

    def _copy(self, output: BinaryIO, log: FileIO) -> None:
        ready = False
        with output, log:
            self._begun.wait()
            if self._process is not None:
                with contextlib.suppress(OSError):
                    log.write(f"--- {self.spec.name} started, {self.where}\n".encode())
            for raw in output:  # to its end: without a reader the child could not go on
                line = raw.decode(errors="replace").rstrip("\r\n")
                with contextlib.suppress(OSError):  # the disk is full
                    log.write(f"{line}\n".encode())
                if not ready and line.startswith(self.spec.ready_prefix):
                    ready = True
                    self._io.post(Ready(self, line.removeprefix(self.spec.ready_prefix).strip()))
                    continue
                self.tail.append(line)
                with contextlib.suppress(OSError):  # nobody reads what the launcher says
                    self._io.echo(line)

    def _run(self, output: int) -> None:
        """Start it and wait for its end; the kernel ends it with this thread."""
        try:
            process = self._start(self.spec, output)
        except OSError as error:
            self._cannot_start(error)
            return
        finally:
            os.close(output)
        with self._lock:
            self._process, pending = process, self._pending
        self._begun.set()
        if pending is not None:
            self.signal(pending)
        code = 1
        try:
            code = process.wait()
        finally:
            # What it said last explains the end; a grandchild may hold the pipe open for ever.
            self._copier.join(_DRAIN_OUTPUT_S)
            self._io.post(Exited(self, code, describe_exit(code)))


def _thread(name: str, target: Callable[..., None], *args: object) -> threading.Thread:
    """Start a thread.

    Raises:
        OSError: The system has none left.
    """
    thread = threading.Thread(target=target, args=args, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise OSError(str(error)) from error
    return thread


def _open_log(path: Path) -> FileIO:
    """The log, to be appended to; nowhere if it cannot be opened."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)  # a cleaner of caches may have removed it
        return FileIO(path, "a")
    except OSError:
        return FileIO(os.devnull, "a")


def describe_exit(code: int) -> str:
    """`exit status 1`, or `signal SIGTERM`; what was killed may have had no last word."""
    if code >= 0:
        return f"exit status {code}"
    if code == -signal.SIGKILL:
        return "signal SIGKILL: out of memory?"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"
