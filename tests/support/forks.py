"""Workers under test are forked by one process that imports torch, as `tasuki serve` forks its own.

The import takes a worker longer than all the rest of its start, and tests start hundreds.
The server starts with the first worker and ends with this process.
"""

from __future__ import annotations

import atexit
import functools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import BinaryIO
from unittest import mock

from tasuki.launch.forking import ForkServer, LocalProcess
from tasuki.launch.topology import PRELOAD, ProcessSpec

# A process reads variables that begin so once, as it starts or imports torch.
_READ_ONCE = ("KMP_", "LD_", "MALLOC_", "MKL_", "OMP_", "ONEDNN_", "OPENBLAS_", "PYTHON", "TORCH")


class Forked:
    """A child of this process that the server has forked; the part of `Popen` that tests use."""

    def __init__(self, process: LocalProcess) -> None:
        self._process = process  # kept: its end is waited for here
        self.pid = process.pid
        self._lock = threading.Lock()
        self._code: int | None = None

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        with self._lock:
            if self._code is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                self._code = os.waitstatus_to_exitcode(status) if pid else None
            return self._code

    def wait(self, timeout: float) -> int:
        """Its exit code, once it has ended.

        Raises:
            subprocess.TimeoutExpired: It still runs.
        """
        end_s = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > end_s:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(0.005)
        return code


def fork(
    name: str, command: Sequence[str], environment: Mapping[str, str], output: BinaryIO
) -> Forked | None:
    """Fork `python -m COMMAND`; None where the server's environment is another one.

    Args:
        name: For messages.
        command: Module, then arguments.
        environment: Of the process.
        output: Its output, errors too.
    """
    server, base = _server(tuple(sorted(_read_once(environment).items())))
    if not base.keys() <= environment.keys():
        return None
    changed = {key: value for key, value in environment.items() if base.get(key) != value}
    sys.audit("support.fork", name)
    module, *arguments = command
    spec = ProcessSpec(
        name,
        tuple(arguments),
        (),
        "ready ",
        program=(sys.executable, "-m", module),
        assigned=tuple(changed.items()),
        preload=PRELOAD,
    )
    return Forked(server.start(spec, output.fileno()))


def start_fork_server(environment: Mapping[str, str]) -> None:
    """Start the server of processes with this environment, and let it import torch meanwhile."""
    _server(tuple(sorted(_read_once(environment).items())))


def _read_once(environment: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in environment.items() if key.startswith(_READ_ONCE)}


@functools.cache
def _server(read_once: tuple[tuple[str, str], ...]) -> tuple[ForkServer, dict[str, str]]:
    """The server for processes with these variables, and its whole environment."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    for key in _read_once(kept):
        del kept[key]
    kept |= dict(read_once)
    with mock.patch.dict(os.environ, kept, clear=True):
        server = ForkServer(PRELOAD, {})
    atexit.register(server.close)
    return server, kept
