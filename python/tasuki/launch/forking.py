"""How a child process is started: by itself, or forked by a process that has imported torch.

Threads: `ForkServer.start` may be called by any thread, one at a time goes on; the
others of a `ForkServer` belong to the main thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from tasuki.launch.fork_server import REQUEST_BYTES
from tasuki.launch.parent_death import PARENT_VARIABLE
from tasuki.launch.topology import ProcessSpec, merged_environment

_TITLE_BYTES = 4096
_PR_SET_CHILD_SUBREAPER = 36


class Process(Protocol):
    """A started process, in a session of its own."""

    @property
    def where(self) -> str:
        """Its place, for the log: `pid 4711`, `node 10.0.0.1, pid 4711`."""

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to its process group; nothing happens if it is gone. Never waits."""

    def wait(self) -> int:
        """Its exit code, once it has ended; negative for a signal."""


# Starts a process and connects its output, errors too, to a handle.
Starter = Callable[[ProcessSpec, int], Process]


class _EndedError(Exception):
    """The fork server has not forked; says why."""


class LocalProcess:
    """A child of this process.

    Args:
        pid: Its process id, which is its process group's too.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid

    @property
    def where(self) -> str:
        """See `Process`."""
        return f"pid {self.pid}"

    def signal(self, number: signal.Signals) -> None:
        """See `Process`."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def wait(self) -> int:
        """See `Process`."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class _Spawned(LocalProcess):
    """As subprocess made it: that one keeps its exit code."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        super().__init__(process.pid)
        self._process = process

    def wait(self) -> int:
        return self._process.wait()


def spawn(spec: ProcessSpec, output: int) -> LocalProcess:
    """Start a process anew. Must be called by a thread that outlives it: see `follow_parent`.

    Args:
        spec: What to start.
        output: Handle for its output, errors too.

    Raises:
        OSError: The system cannot start it.
    """
    environment = merged_environment(os.environ, spec)
    environment[PARENT_VARIABLE] = str(os.getpid())
    process = subprocess.Popen(
        [*spec.program, *spec.arguments],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env=environment,
        start_new_session=True,
    )
    return _Spawned(process)


class ForkServer:
    """Holds a process that imports `preload` and forks the processes that ask for it.

    Args:
        preload: Modules, as in the `ProcessSpec` of those processes.
        environment: As there. Libraries read some variables once, when they are
            imported (OMP_NUM_THREADS).
    """

    def __init__(self, preload: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start it. Must be called by the main thread: see `follow_parent`."""
        self._preload, self._environment = tuple(preload), dict(environment)
        self._lock = threading.Lock()
        self._closed = False
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        own = {**environment, **os.environ, PARENT_VARIABLE: str(os.getpid())}
        command = [sys.executable, "-m", "tasuki.launch.fork_server", str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(
                [*command, *preload, " " * _TITLE_BYTES],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=own,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, spec: ProcessSpec, output: int) -> LocalProcess:
        """Fork a process, or start it anew where it cannot be forked.

        Waits until the modules are imported.

        Args:
            spec: What to start.
            output: Handle for its output, errors too.

        Raises:
            OSError: The system cannot start it, or `close` was called.
        """
        if (spec.preload, dict(spec.environment)) != (self._preload, self._environment):
            return spawn(spec, output)
        try:
            return LocalProcess(self._fork(spec, output))
        except _EndedError as error:
            if self._closed:
                raise OSError("the launcher ends") from error
            os.write(output, f"tasuki: {error}: {spec.name} is started without it\n".encode())
            return spawn(spec, output)

    def close(self) -> None:
        """End it; what it has forked goes on. A `start` that waits fails."""
        self._closed = True
        self._process.kill()
        self._process.wait()

    def _fork(self, spec: ProcessSpec, output: int) -> int:
        """Have a process forked, and adopt it; gives its id."""
        request = {
            "module": spec.program[-1],
            "arguments": spec.arguments,
            "environment": dict(spec.assigned),
            "launcher": os.getpid(),
        }
        message = json.dumps(request).encode()
        if len(message) > REQUEST_BYTES:
            raise _EndedError(f"a request has {len(message)} bytes, at most {REQUEST_BYTES}")
        with self._lock:
            _adopt_orphans(True)
            try:
                return self._ask(message, output)
            finally:
                _adopt_orphans(False)

    def _ask(self, message: bytes, output: int) -> int:
        """Send a request and wait for the new process; gives its id."""
        read, write = os.pipe()
        with open(read, "rb") as answer:
            try:
                socket.send_fds(self._channel, [message], [output, write])
            except OSError as error:
                raise _EndedError(f"the fork server has ended ({error})") from error
            finally:
                os.close(write)
            pid = answer.read()  # ends when nobody is left who might answer
        if not pid:
            raise _EndedError("the fork server has ended")
        return int(pid)


def _adopt_orphans(adopt: bool) -> None:
    """Whether processes without parent, below this one, become its children (Linux)."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, int(adopt), 0, 0, 0)
