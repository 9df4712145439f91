"""Children of a measurement: started apart from the terminal, ended for sure.

They run in sessions of their own, so that Ctrl-C reaches this process alone,
which then ends them in order, at its own end at the latest. They die with the
thread that started them whatever happens to it (see `tasuki.launch.parent_death`).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tasuki.bench.arguments import words_without_secrets
from tasuki.bench.errors import RunFailedError
from tasuki.launch.parent_death import PARENT_VARIABLE
from tasuki.launch.supervisor import last_words

_KILL_GRACE_S = 10.0
_LEFT_GRACE_S = 60.0  # for a child that an interruption took from its owner
_TAIL_BYTES = 8192
_TAIL_LINES = 12

_running: set[subprocess.Popen[bytes]] = set()


def start_child(
    arguments: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Run `tasuki ARGUMENTS`, with more variables; its output is appended to `log`.

    Raises:
        RunFailedError: The log cannot be written.
    """
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        output = log.open("ab", buffering=0)
    except OSError as error:
        raise _not_written(log, error) from error
    with output:
        try:
            output.write(f"--- tasuki {' '.join(words_without_secrets(arguments))}\n".encode())
        except OSError as error:
            raise _not_written(log, error) from error
        with _interrupts_wait():
            process = subprocess.Popen(
                [sys.executable, "-m", "tasuki", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={
                    **os.environ,
                    **(environment or {}),
                    "PYTHONUNBUFFERED": "1",
                    PARENT_VARIABLE: str(os.getpid()),
                },
                start_new_session=True,
            )
            _running.add(process)
        return process


@contextlib.contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Ctrl-C and SIGTERM take effect at the end of the block; they interrupt no other thread."""
    came: list[int] = []
    is_main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM) if is_main else ()
    before = {each: found for each in numbers if callable(found := signal.getsignal(each))}
    try:
        for number in before:
            signal.signal(number, lambda number, _: came.append(number))
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if came:
        signal.raise_signal(came[0])


@atexit.register
def _end_left() -> None:
    """End the children whose owner was interrupted before it had them."""
    for process in tuple(_running):
        end_child(process, _LEFT_GRACE_S)


def _not_written(log: Path, error: OSError) -> RunFailedError:
    return RunFailedError(f"{log} cannot be written ({error.strerror}): make room for logs there")


def end_child(process: subprocess.Popen[bytes], grace_s: float) -> None:
    """SIGINT, and SIGKILL to the whole group after `grace_s` or on another Ctrl-C."""
    try:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.wait(grace_s)
    except subprocess.TimeoutExpired:
        pass
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(_KILL_GRACE_S)
        _running.discard(process)


def explain(log: Path) -> str:
    """What the last process of `log` said before its end, in one line."""
    try:
        with log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            said_all = file.read().decode(errors="replace")
    except OSError as error:
        return f"({log} cannot be read: {error.strerror})"
    lines = said_all.split("--- tasuki ")[-1].splitlines()[1:]
    said = [line.strip() for line in last_words(lines[-_TAIL_LINES:]) if line.strip()]
    return " | ".join(said) or "(no output)"
