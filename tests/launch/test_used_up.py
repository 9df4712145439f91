"""The supervisor on a machine that has no thread or descriptor left."""

from __future__ import annotations

import errno
import os
import signal
import threading
from pathlib import Path

import pytest
from test_supervisor import DEADLINE_S, SERVE, eventually, spec

from tasuki.launch.errors import LaunchError
from tasuki.launch.supervisor import Stop, Supervisor

pytestmark = pytest.mark.system


def no_thread(monkeypatch: pytest.MonkeyPatch, times: int, spare: int = 0) -> list[int]:
    """The next threads cannot be started; gives what is left of `spare` and of `times`."""
    begin, left = threading.Thread.start, [spare, times]

    def start(thread: threading.Thread) -> None:
        index = 0 if left[0] else 1
        if left[index]:
            left[index] -= 1
            if index:
                raise RuntimeError("can't start new thread")
        begin(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    return left


def no_pipe(monkeypatch: pytest.MonkeyPatch, times: int) -> list[int]:
    pipe, left = os.pipe, [times]

    def fail() -> tuple[int, int]:
        if left[0]:
            left[0] -= 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return pipe()

    monkeypatch.setattr(os, "pipe", fail)
    return left


@pytest.mark.parametrize("lacks", ["thread", "second thread", "descriptor"])
def test_a_restart_without_threads_or_descriptors_is_tried_again(
    supervisor: Supervisor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    lacks: str,
) -> None:
    pids = tmp_path / "pids"
    supervisor.start([spec("decode-0", SERVE, str(pids))])
    supervisor.await_ready(["decode-0"], DEADLINE_S)
    if lacks == "descriptor":
        left = no_pipe(monkeypatch, 3)
    else:
        left = no_thread(monkeypatch, 3, spare=1 if lacks == "second thread" else 0)
    os.kill(int(pids.read_text().split()[0]), signal.SIGKILL)

    def is_back() -> bool:
        supervisor.wait(0.1, restart=True)
        return len(pids.read_text().splitlines()) == 2

    eventually(is_back)
    assert sum(left) == 0
    said = capfd.readouterr().err
    assert "can't start new thread" in said or "Too many open files" in said


@pytest.mark.parametrize("spare", [0, 1])
def test_a_start_without_threads_is_an_error_and_keeps_no_descriptor(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch, spare: int
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    no_thread(monkeypatch, 1, spare)
    supervisor.start([spec("decode-0", SERVE)])
    with pytest.raises(LaunchError, match=r"decode-0 ended(.|\n)*can't start new thread"):
        supervisor.await_ready(["decode-0"], DEADLINE_S)
    eventually(lambda: len(os.listdir("/proc/self/fd")) == before)


def test_a_later_call_needs_no_thread(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_thread(monkeypatch, 1)
    supervisor.call_later(0.0, lambda: supervisor.post(Stop(3)))
    assert supervisor.run() == 3
