"""One child process: started in its own session, its output copied line by line.

Threads: the launcher's main thread starts and signals children; per child, one
thread copies the output and one waits for the end. They tell the main thread
through a queue and share nothing else.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tasuki.launch.parent_death import PARENT_VARIABLE
from tasuki.launch.topology import ProcessSpec, merged_environment

_TAIL_LINES = 30
_DRAIN_OUTPUT_S = 1.0


@dataclass(frozen=True, slots=True)
class Ready:
    """The child has said that it is ready, and where."""

    child: Child
    address: str


@dataclass(frozen=True, slots=True)
class Exited:
    """The child has ended; `code` is negative for a signal, as in `subprocess`."""

    child: Child
    code: int


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

    def __init__(self, spec: ProcessSpec, io: ChildIo) -> None:
        """Start it. Must be called by the main thread: see `follow_parent`."""
        self.spec = spec
        self.started_s = time.monotonic()
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._io = io
        environment = merged_environment(os.environ, spec)
        environment[PARENT_VARIABLE] = str(os.getpid())
        self._process = subprocess.Popen(
            [*spec.program, *spec.arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        self._copier = threading.Thread(target=self._copy, name=f"{spec.name}-output", daemon=True)
        self._copier.start()
        threading.Thread(target=self._wait, name=f"{spec.name}-wait", daemon=True).start()

    @property
    def pid(self) -> int:
        """Its process id, which is its process group's too."""
        return self._process.pid

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the whole process group; nothing happens if it is gone."""
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            return

    def _copy(self) -> None:
        assert self._process.stdout is not None
        ready = False
        with self._io.log_path.open("a", encoding="utf-8") as log:
            log.write(f"--- {self.spec.name} started, pid {self.pid}\n")
            for raw in self._process.stdout:
                line = raw.decode(errors="replace").rstrip("\r\n")
                log.write(line + "\n")
                log.flush()
                if not ready and line.startswith(self.spec.ready_prefix):
                    ready = True
                    self._io.post(Ready(self, line.removeprefix(self.spec.ready_prefix).strip()))
                    continue
                self.tail.append(line)
                self._io.echo(line)

    def _wait(self) -> None:
        code = self._process.wait()
        # What it said last explains the end; a grandchild may hold the pipe open for ever.
        self._copier.join(_DRAIN_OUTPUT_S)
        self._io.post(Exited(self, code))


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
