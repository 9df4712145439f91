"""Children of a measurement: started apart from the terminal, ended for sure.

They run in sessions of their own, so that Ctrl-C reaches this process alone,
which then ends them in order; they die with this process whatever happens to
it. Must be used by the main thread (see `tasuki.launch.parent_death`).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tasuki.bench.arguments import words_without_secrets
from tasuki.bench.errors import RunFailedError
from tasuki.launch.parent_death import PARENT_VARIABLE
from tasuki.launch.supervisor import last_words

_KILL_GRACE_S = 10.0
_TAIL_BYTES = 8192
_TAIL_LINES = 12


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
        return subprocess.Popen(
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


def explain(log: Path) -> str:
    """What the last process of `log` said before its end, in one line."""
    with log.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - _TAIL_BYTES))
        lines = file.read().decode(errors="replace").split("--- tasuki ")[-1].splitlines()[1:]
    said = [line.strip() for line in last_words(lines[-_TAIL_LINES:]) if line.strip()]
    return " | ".join(said) or "(no output)"
