"""A child process whose output goes to a file, with the means to hurt it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import psutil

from support.forks import Forked, fork
from support.waiting import until

REPOSITORY = Path(__file__).resolve().parents[2]


class ProcessFailedError(Exception):
    """A process ended while something was expected of it; the message has its last lines."""


def environment(checkout: Path = REPOSITORY, **extra: str) -> dict[str, str]:
    """The environment of every process under test: a checkout, one thread, no hub."""
    folders = [str(checkout / "python")]
    if checkout == REPOSITORY:
        folders += [str(REPOSITORY / "tests"), os.environ.get("PYTHONPATH", "")]
    path = os.pathsep.join(folder for folder in folders if folder)
    # Agents of NIXL in the tests' own process choose a network for themselves by this variable.
    inherited = {name: value for name, value in os.environ.items() if name != "UCX_NET_DEVICES"}
    return {
        **inherited,
        "PYTHONPATH": path,
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "passive",
        "KMP_BLOCKTIME": "0",
        "HF_HUB_OFFLINE": "1",
        **extra,
    }


def further_ranks(worker: str) -> list[psutil.Process]:
    """The ranks from 1 on of the worker of this `--name`, among our descendants.

    Some of the processes looked at may be ending: those are none.
    """
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            parent = process.parent()
            if parent is None or "tasuki.worker.rank_process" not in process.cmdline():
                continue
            if worker in parent.cmdline():
                found.append(process)
    return found


def has_ended(process: psutil.Process) -> bool:
    """Whether it has; a zombie has: an orphan stays one where nobody reaps it.

    It may end between two looks at it, then the second one raises.
    """
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


class Process:
    """`python -m tasuki ARGUMENTS` in its own process group.

    Args:
        name: for messages and the log file.
        arguments: after `tasuki`.
        log: output of every start is appended there.
        module: what runs in place of `tasuki`, and its arguments before the others.
        program: what runs in place of Python and the module.
        checkout: the folder of the revision that runs, with its extension built.
    """

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        log: Path,
        module: Sequence[str] = ("tasuki",),
        program: Sequence[str] = (),
        checkout: Path = REPOSITORY,
    ) -> None:
        self.name = name
        self.arguments = [*(() if program else module), *arguments]
        self._program = [*program] or [sys.executable, "-m"]
        self.log = log
        self._checkout = checkout
        self._popen: subprocess.Popen[bytes] | Forked | None = None
        self._log_start = 0

    def start(self) -> None:
        """Starts it (again)."""
        with self.log.open("ab") as output:
            self._log_start = output.tell()
            self._popen = self._forked(output)
            if self._popen is not None:
                return
            self._popen = subprocess.Popen(
                [*self._program, *self.arguments],
                cwd=self._checkout,
                env=environment(self._checkout),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _forked(self, output: BinaryIO) -> Forked | None:
        """Workers are forked, from where the repository is; all else is started anew."""
        if "worker" not in self.arguments or not self._checkout == Path.cwd() == REPOSITORY:
            return None
        return fork(self.name, self.arguments, environment(), output)

    @property
    def pid(self) -> int:
        assert self._popen is not None, f"{self.name} was never started"
        return self._popen.pid

    def exit_code(self) -> int | None:
        """None while it runs."""
        assert self._popen is not None, f"{self.name} was never started"
        return self._popen.poll()

    def output(self) -> str:
        """What it printed since its latest start."""
        with self.log.open("rb") as file:
            file.seek(self._log_start)
            return file.read().decode(errors="replace")

    def tail(self, lines: int = 40) -> str:
        return "\n".join(self.output().splitlines()[-lines:])

    def wait_for_line(self, beginning: str, *, deadline_s: float) -> str:
        """The rest of the first output line that begins so.

        Raises:
            ProcessFailedError: it ended before.
            TimeoutError: it is still silent.
        """

        def probe() -> str | None:
            code = self.exit_code()
            for line in self.output().splitlines():
                if line.startswith(beginning):
                    return line.removeprefix(beginning).strip() or line
            if code is not None:
                raise ProcessFailedError(f"{self.name} ended with {code}:\n{self.tail()}")
            return None

        return until(
            probe,
            lambda: f"{self.name} printing {beginning!r}; its last lines:\n{self.tail()}",
            deadline_s=deadline_s,
            interval_s=0.05,
        )

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the process alone."""
        os.kill(self.pid, number)

    def wait(self, *, deadline_s: float = 60.0) -> int:
        """Its exit code; the process is killed when it does not end in time.

        Raises:
            TimeoutError: it had to be killed; says where its threads were.
        """
        assert self._popen is not None
        try:
            return self._popen.wait(deadline_s)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGABRT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._popen.wait(10)
            tail = self.tail(200)
            self.kill()
            raise TimeoutError(
                f"{self.name} did not end within {deadline_s:g} s; last lines:\n{tail}"
            ) from None

    def kill(self) -> None:
        """SIGKILL to the whole group, and reaps it. Harmless when it is gone."""
        if self._popen is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._popen.pid, signal.SIGKILL)
        self._popen.wait(60)

    def anonymous_bytes(self) -> int:
        """Resident memory that is no file's: what a leak grows."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return 1024 * int(line.split()[1])
        raise ProcessFailedError(f"{self.name} is gone:\n{self.tail()}")

    def cpu_s(self) -> float:
        """Processor seconds used so far, user and system."""
        times = psutil.Process(self.pid).cpu_times()
        return float(times.user + times.system)

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.pid).children(recursive=True)
