"""The supervisor over real, tiny processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from support.processes import has_ended

from tasuki.launch.backoff import BackoffPolicy
from tasuki.launch.errors import LaunchError
from tasuki.launch.supervisor import Call, Stop, StoppedError, Supervisor, last_words, tell
from tasuki.launch.topology import ProcessSpec

pytestmark = pytest.mark.system

DEADLINE_S = 60.0

# Says where it is, appends its pid to a file, and sleeps.
SERVE = """
import os, sys, time
port = sys.argv[sys.argv.index("--port") + 1]
with open(sys.argv[-1], "a") as pids:
    pids.write(f"{os.getpid()} {port}\\n")
print(f"ready 127.0.0.1:{port if port != '0' else '4711'}", flush=True)
time.sleep(600)
"""
FAIL = "import sys; print('the pool has no room'); sys.exit('out of luck')"
STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready 127.0.0.1:1", flush=True)
time.sleep(600)
"""


def spec(name: str, code: str, *more: str, may_move: bool = False) -> ProcessSpec:
    arguments = ("--port", "0", *more)
    program = (sys.executable, "-c", code)
    return ProcessSpec(name, arguments, (), "ready ", program, may_move=may_move)


def eventually(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline_s, "not so within the deadline"
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_death_at_start_is_told_in_its_own_words(supervisor: Supervisor, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    supervisor.start([spec("decode-0", SERVE, str(pids)), spec("prefill-0", FAIL)])
    with pytest.raises(LaunchError) as ended:
        supervisor.await_ready(["decode-0", "prefill-0"], DEADLINE_S)
    message = str(ended.value)
    assert "prefill-0" in message
    assert "exit status 1" in message
    assert "the pool has no room" in message
    assert "out of luck" in message
    assert supervisor.died


def test_a_later_call_is_made_between_events(supervisor: Supervisor) -> None:
    threads: list[threading.Thread] = []

    def call() -> None:
        threads.append(threading.current_thread())
        supervisor.post(Stop(3))

    supervisor.call_later(0.01, call)
    assert supervisor.run() == 3
    assert threads == [threading.current_thread()]


def test_a_wait_handles_ends(supervisor: Supervisor, tmp_path: Path) -> None:
    supervisor.start([spec("prefill-0", FAIL)])
    with pytest.raises(LaunchError, match="the pool has no room"):
        while True:
            supervisor.wait(0.1)

    pids = tmp_path / "pids"
    supervisor.start([spec("decode-0", SERVE, str(pids))])
    supervisor.await_ready(["decode-0"], DEADLINE_S, restart=True)
    os.kill(int(pids.read_text().split()[0]), signal.SIGKILL)

    def is_back() -> bool:
        supervisor.wait(0.1, restart=True)
        return len(pids.read_text().splitlines()) == 2

    eventually(is_back)


def test_readiness_has_a_deadline(supervisor: Supervisor) -> None:
    supervisor.start([spec("mixed-0", "import time; time.sleep(600)")])
    with pytest.raises(LaunchError, match=r"mixed-0 not ready after 0\.1 s"):
        supervisor.await_ready(["mixed-0"], 0.1)


def test_a_stop_interrupts_the_start(supervisor: Supervisor) -> None:
    supervisor.start([spec("mixed-0", "import time; time.sleep(600)")])
    supervisor.post(Stop(3))
    with pytest.raises(StoppedError) as stopped:
        supervisor.await_ready(["mixed-0"], DEADLINE_S)
    assert stopped.value.code == 3


def test_the_dead_come_back_on_their_port(supervisor: Supervisor, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    supervisor.start([spec("decode-0", SERVE, str(pids))])
    assert supervisor.await_ready(["decode-0"], DEADLINE_S) == ["127.0.0.1:4711"]

    def lines() -> list[list[str]]:
        return [line.split() for line in pids.read_text().splitlines()]

    def kill_and_watch() -> None:
        for incarnation in (1, 2):
            os.kill(int(lines()[-1][0]), signal.SIGKILL)
            eventually(lambda count=incarnation: len(lines()) > count)  # type: ignore[misc]
        supervisor.post(Stop(0))

    watcher = threading.Thread(target=kill_and_watch)
    watcher.start()
    assert supervisor.run() == 0
    watcher.join(DEADLINE_S)
    assert [port for _, port in lines()] == ["0", "4711", "4711"]
    assert supervisor.died


@pytest.mark.parametrize(("may_move", "ports"), [(True, "0 4711 0"), (False, "0 4711 4711")])
def test_a_port_that_is_taken_is_tried_once(
    supervisor: Supervisor, tmp_path: Path, may_move: bool, ports: str
) -> None:
    tried = tmp_path / "tried"
    taken = SERVE.replace("print", "assert port == '0', 'taken'\nprint", 1)
    supervisor.start([spec("decode-0", taken, str(tried), may_move=may_move)])
    supervisor.await_ready(["decode-0"], DEADLINE_S)
    os.kill(int(tried.read_text().split()[0]), signal.SIGKILL)

    def three() -> bool:
        supervisor.wait(0.1, restart=True)
        return len(tried.read_text().splitlines()) >= 3

    eventually(three)
    assert " ".join(line.split()[1] for line in tried.read_text().splitlines()) == ports


def test_stop_ends_even_the_stubborn_and_the_stopped(supervisor: Supervisor) -> None:
    supervisor.start([spec("mixed-0", STUBBORN), spec("mixed-1", STUBBORN)])
    supervisor.await_ready(["mixed-0", "mixed-1"], DEADLINE_S)
    children = [m.child for m in supervisor._members.values()]
    pids = [int(c.where.removeprefix("pid ")) for c in children if c is not None]
    os.kill(pids[1], signal.SIGSTOP)
    supervisor.stop(supervisor.names(), grace_s=0.2)
    assert not any(is_alive(pid) for pid in pids)
    assert not supervisor.died


def test_output_is_kept_by_name(supervisor: Supervisor, tmp_path: Path) -> None:
    supervisor.start([spec("prefill-0", FAIL)])
    with pytest.raises(LaunchError):
        supervisor.await_ready(["prefill-0"], DEADLINE_S)
    assert "out of luck" in (tmp_path / "logs" / "prefill-0.log").read_text()


def test_where_no_output_can_be_kept_or_shown_children_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoReader:
        def write(self, text: str) -> None:
            raise BrokenPipeError(32, "Broken pipe")

    talks = """
import sys, time
for number in range(200):
    print("x" * 1000, flush=True)
print("ready 127.0.0.1:1", flush=True)
for number in range(200):
    print("y" * 1000, flush=True)
open(sys.argv[-1], "w").close()
time.sleep(600)
"""
    (tmp_path / "mixed-0.log").symlink_to("/dev/full")
    monkeypatch.setattr(sys, "stderr", NoReader())
    supervisor = Supervisor(tmp_path, echo=True)
    supervisor.start([spec("mixed-0", talks, str(tmp_path / "went on"))])
    try:
        assert supervisor.await_ready(["mixed-0"], DEADLINE_S) == ["127.0.0.1:1"]
        eventually((tmp_path / "went on").exists)
    finally:
        supervisor.stop(supervisor.names(), grace_s=0.0)


@pytest.mark.parametrize("is_file", [False, True])
def test_a_child_starts_where_its_log_cannot_be_opened(tmp_path: Path, is_file: bool) -> None:
    folder = tmp_path / "removed"
    if is_file:
        folder.write_text("in place of the folder")
    supervisor = Supervisor(folder, echo=False)
    supervisor.start([spec("decode-0", SERVE, str(tmp_path / "pids"))])
    try:
        assert supervisor.await_ready(["decode-0"], DEADLINE_S) == ["127.0.0.1:4711"]
        assert is_file or "decode-0 started" in (folder / "decode-0.log").read_text()
    finally:
        supervisor.stop(supervisor.names(), grace_s=0.0)


def test_what_the_launcher_says_may_have_no_reader_or_no_room() -> None:
    read, write = os.pipe()
    with open(write, "w") as unread:
        os.close(read)
        for _ in range(3):
            tell("x" * 10_000, unread)
        assert os.readlink(f"/proc/self/fd/{unread.fileno()}") == os.devnull
    with open("/dev/full", "w") as full:
        tell("x", full)
        assert os.readlink(f"/proc/self/fd/{full.fileno()}") == "/dev/full"
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, full.fileno())  # so that it can be closed
        os.close(nothing)


def test_output_is_shown_with_the_name_before_each_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    supervisor = Supervisor(tmp_path, echo=True)
    supervisor.start([spec("prefill-0", FAIL)])
    with pytest.raises(LaunchError):
        supervisor.await_ready(["prefill-0"], DEADLINE_S)
    shown = capsys.readouterr().err.splitlines()
    assert sorted(shown) == ["prefill-0 | out of luck", "prefill-0 | the pool has no room"]


def test_who_was_killed_may_have_run_out_of_memory(supervisor: Supervisor) -> None:
    supervisor.start([spec("prefill-0", "import os; os.kill(os.getpid(), 9)")])
    with pytest.raises(LaunchError, match=r"prefill-0 ended .*SIGKILL: out of memory\?"):
        supervisor.await_ready(["prefill-0"], DEADLINE_S)


# Starts a child that follows it, says the child's pid, and waits to be killed.
LAUNCHER = """
import os, subprocess, sys, time
child = subprocess.Popen(
    [sys.executable, "-c", sys.argv[1]],
    env={**os.environ, "TASUKI_PARENT_PID": str(os.getpid())},
    stdout=subprocess.PIPE,
)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(600)
"""
FOLLOWER = """
import time
from tasuki.launch.parent_death import follow_parent
follow_parent()
print("following", flush=True)
time.sleep(600)
"""


def test_children_die_with_a_killed_launcher() -> None:
    command = [sys.executable, "-c", LAUNCHER, FOLLOWER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        child = psutil.Process(int(launcher.stdout.readline()))
        launcher.kill()

    eventually(lambda: has_ended(child))


@pytest.mark.parametrize(
    ("tail", "words"),
    [
        ([], ["(no output)"]),
        (["a", "b"], ["a", "b"]),
        (["noise", "tasuki: error: no room", "try less"], ["no room", "try less"]),
    ],
)
def test_the_last_words_are_the_error_if_there_is_one(tail: list[str], words: list[str]) -> None:
    assert last_words(tail) == words


def test_calls_are_made_between_events(supervisor: Supervisor) -> None:
    made: list[int] = []
    supervisor.post(Call(lambda: made.append(threading.get_ident())))
    supervisor.post(Call(lambda: supervisor.post(Stop(5))))
    assert supervisor.run() == 5
    assert made == [threading.get_ident()]


def test_who_joins_and_fails_is_told_while_others_are_restarted(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    pids = tmp_path / "pids"
    supervisor.start([spec("decode-0", SERVE, str(pids))])
    supervisor.await_ready(["decode-0"], DEADLINE_S)
    os.kill(int(pids.read_text().split()[0]), signal.SIGKILL)
    supervisor.start([spec("decode-1", "import sys; sys.stdin.read(); sys.exit('no room')")])
    with pytest.raises(LaunchError, match=r"decode-1 ended(.|\n)*no room"):
        supervisor.await_ready(["decode-1"], DEADLINE_S, restart=True)
    supervisor.start([spec("decode-2", SERVE, str(pids))])
    supervisor.await_ready(["decode-2"], DEADLINE_S, restart=True)
    supervisor.retire(["decode-1"], grace_s=DEADLINE_S)
    assert supervisor.names() == ["decode-0", "decode-2"]


def test_who_is_retired_ends_for_good(tmp_path: Path) -> None:
    ready: list[tuple[str, str]] = []
    logs = tmp_path / "logs"
    logs.mkdir()
    supervisor = Supervisor(
        logs, echo=False, policy=BackoffPolicy(first_s=0.05), on_ready=lambda *at: ready.append(at)
    )
    pids = tmp_path / "pids"
    supervisor.start([spec("decode-0", SERVE, str(pids)), spec("decode-1", STUBBORN)])
    supervisor.await_ready(["decode-0", "decode-1"], DEADLINE_S)
    assert sorted(ready) == [("decode-0", "127.0.0.1:4711"), ("decode-1", "127.0.0.1:1")]
    supervisor.retire(["decode-1"], grace_s=0.2)
    assert supervisor.names() == ["decode-0"]
    supervisor.retire(["decode-0"], grace_s=DEADLINE_S)
    assert not is_alive(int(pids.read_text().split()[0]))
    assert supervisor.names() == []
    assert not supervisor.died
