"""The fork server over real processes."""

from __future__ import annotations

import os
import queue
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tasuki.launch.forking import ForkServer
from tasuki.launch.process import Child, ChildIo, Exited, Ready
from tasuki.launch.topology import ProcessSpec

pytestmark = pytest.mark.system

DEADLINE_S = 60.0
pytestmark = pytest.mark.system

PRELOADED = """
import os
with open(os.environ["IMPORTS"], "a") as file:
    file.write(f"{os.getpid()}\\n")
"""
PROGRAM = """
import os, sys, time
import preloaded
print("ready", os.getpid(), os.getppid(), os.getsid(0), os.environ.get("OF_IT"), flush=True)
if sys.argv[1] == "sleep":
    time.sleep(600)
sys.exit(int(sys.argv[1]))
"""
THREADED = """
import threading, time
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
"""


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder from which the processes import."""
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "preloaded.py").write_text(PRELOADED)
    (folder / "program.py").write_text(PROGRAM)
    (folder / "threaded.py").write_text(THREADED)
    monkeypatch.setenv("IMPORTS", str(tmp_path / "imports"))
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    return folder


@pytest.fixture
def forks(modules: Path) -> Iterator[ForkServer]:
    with ForkServer(("preloaded",), {}) as server:
        yield server


def spec(*arguments: str, of_it: str = "", preload: str = "preloaded") -> ProcessSpec:
    return ProcessSpec(
        "mixed-0",
        arguments,
        (),
        "ready ",
        program=(sys.executable, "-m", "program"),
        assigned=(("OF_IT", of_it),),
        preload=(preload,),
    )


class Watched:
    """A child, and what is heard of it."""

    def __init__(self, spec: ProcessSpec, forks: ForkServer, folder: Path) -> None:
        self.news: queue.SimpleQueue[Ready | Exited] = queue.SimpleQueue()
        self.log = folder / "mixed-0.log"
        io = ChildIo(self.log, lambda line: None, self.news.put)
        self.child = Child(spec, io, forks.start)

    def ready(self) -> list[str]:
        """The words of its ready line: pid, parent, session, variable."""
        event = self.news.get(timeout=DEADLINE_S)
        assert isinstance(event, Ready), self.log.read_text()
        return event.address.split()

    def code(self) -> int:
        event = self.news.get(timeout=DEADLINE_S)
        assert isinstance(event, Exited)
        return event.code


def imports(tmp_path: Path) -> int:
    return len((tmp_path / "imports").read_text().splitlines())


def eventually(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline_s, "not so within the deadline"
        time.sleep(0.01)


def test_children_are_ours_and_import_nothing_again(forks: ForkServer, tmp_path: Path) -> None:
    for turn in range(3):
        watched = Watched(spec(str(turn), of_it=f"turn {turn}"), forks, tmp_path)
        pid, parent, session, *variable = watched.ready()
        assert watched.code() == turn
        assert parent == str(os.getpid())
        assert session == pid
        assert " ".join(variable) == f"turn {turn}"
    assert imports(tmp_path) == 1
    assert watched.log.read_text().count("--- mixed-0 started, pid ") == 3


def test_the_command_line_is_what_it_was_asked_to_run(forks: ForkServer, tmp_path: Path) -> None:
    watched = Watched(spec("sleep"), forks, tmp_path)
    process = psutil.Process(int(watched.ready()[0]))
    assert process.cmdline() == [sys.executable, "-m", "program", "sleep"]
    watched.child.signal(signal.SIGTERM)
    assert watched.code() == -signal.SIGTERM


def test_the_end_of_the_fork_server_ends_no_child(forks: ForkServer, tmp_path: Path) -> None:
    watched = Watched(spec("sleep"), forks, tmp_path)
    watched.ready()
    os.kill(forks.pid, signal.SIGKILL)
    after = Watched(spec("7"), forks, tmp_path)
    assert after.ready()[1] == str(os.getpid())
    assert after.code() == 7
    assert imports(tmp_path) == 2, "the second one was started anew"
    assert "the fork server has ended" in after.log.read_text()
    assert watched.news.empty()
    watched.child.signal(signal.SIGKILL)
    assert watched.code() == -signal.SIGKILL


def test_a_process_with_threads_is_never_forked(modules: Path, tmp_path: Path) -> None:
    with ForkServer(("threaded",), {}) as forks:
        watched = Watched(spec("3", preload="threaded"), forks, tmp_path)
        watched.ready()
        assert watched.code() == 3
    assert imports(tmp_path) == 1
    assert "the fork server has ended" in watched.log.read_text()


def test_other_preloads_are_started_anew(forks: ForkServer, tmp_path: Path) -> None:
    watched = Watched(spec("sleep", preload="something"), forks, tmp_path)
    watched.ready()
    watched.child.signal(signal.SIGTERM)
    assert watched.code() == -signal.SIGTERM


def test_closing_ends_a_start_that_waits_for_an_import(modules: Path, tmp_path: Path) -> None:
    (modules / "preloaded.py").write_text(PRELOADED + "import time; time.sleep(600)")
    with ForkServer(("preloaded",), {}) as forks:
        watched = Watched(spec("0"), forks, tmp_path)
        eventually((tmp_path / "imports").exists)
    assert watched.code() == 1
    assert "cannot start it: the launcher ends" in watched.child.tail


def test_a_signal_before_the_start_is_not_lost(modules: Path, tmp_path: Path) -> None:
    go = tmp_path / "go"
    wait = f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.01)"
    (modules / "preloaded.py").write_text(PRELOADED + wait)
    with ForkServer(("preloaded",), {}) as forks:
        watched = Watched(spec("sleep"), forks, tmp_path)
        watched.child.signal(signal.SIGTERM)
        go.touch()
        last = [watched.news.get(timeout=DEADLINE_S)]
        while not isinstance(last[-1], Exited):
            last.append(watched.news.get(timeout=DEADLINE_S))
    assert last[-1].code == -signal.SIGTERM


def test_children_compute_with_the_threads_they_were_given(
    modules: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenMP reads its variables when torch is imported: a parallel region works in a child."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    (modules / "program.py").write_text(
        "import os, torch\n"
        "x = torch.ones(512, 512)\n"
        "total = (x @ x).sum().item() + x.exp().sum().item()\n"
        "threads = len(os.listdir('/proc/self/task'))\n"
        "print('ready', torch.get_num_threads(), threads > 1, total > 0, flush=True)\n"
    )
    environment = {"OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "1"}
    made = ProcessSpec(
        "mixed-0",
        (),
        tuple(environment.items()),
        "ready ",
        program=(sys.executable, "-m", "program"),
        preload=("torch",),
    )
    with ForkServer(("torch",), environment) as forks:
        watched = Watched(made, forks, tmp_path)
        assert watched.ready() == ["2", "True", "True"]
        assert watched.code() == 0
        assert "without it" not in watched.log.read_text()
