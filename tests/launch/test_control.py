"""Orders of `tasuki scale` over the launcher's socket."""

from __future__ import annotations

import errno
import os
import re
import socket
import stat
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tasuki.cli import app
from tasuki.launch import control, machine, serve
from tasuki.launch.config import ServeConfig
from tasuki.launch.control import ControlError, ControlServer, send_order
from tasuki.launch.errors import LaunchError


def obey(role: str, count: int) -> str:
    if role != "decode":
        raise LaunchError(f"{role!r} is no role")
    return f"{role}: {count}"


def serving(path: Path | None) -> ControlServer:
    made = ControlServer(path)
    made.begin(obey, lambda function: function())
    return made


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    base = tmp_path_factory.mktemp("s")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(base))
    return base / "tasuki"


@pytest.fixture
def server(folder: Path) -> Iterator[ControlServer]:
    made = serving(None)
    yield made
    made.close()


def test_an_order_is_answered(server: ControlServer, folder: Path) -> None:
    assert server.path == folder / f"{os.getpid()}.sock"
    assert send_order(None, "decode", 3) == "decode: 3"
    with pytest.raises(ControlError, match="'both' is no role"):
        send_order(server.path, "both", 3)
    assert send_order(server.path, "decode", 1) == "decode: 1"


def test_the_folder_under_tmp_is_this_users_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(control, "_TEMPORARY", tmp_path)
    base = tmp_path / f"tasuki-{os.getuid()}"
    before = os.umask(0o002)
    try:
        serving(None).close()
        assert stat.S_IMODE(base.stat().st_mode) == 0o700
        base.chmod(0o777)  # as an older version made it
        serving(None).close()
        assert stat.S_IMODE(base.stat().st_mode) == 0o700
    finally:
        os.umask(before)
    (base / "tasuki").rename(tmp_path / "elsewhere")
    (base / "tasuki").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(LaunchError, match=r"tasuki is a link.*remove it, or set XDG_RUNTIME_DIR"):
        ControlServer(None)
    (tmp_path / f"tasuki-{os.getuid() + 1}").mkdir()
    another, owner = os.getuid() + 1, os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: another)
    refused = f"tasuki-{another} is a folder of user {owner}, and .* folder of user {another}"
    for use in (lambda: ControlServer(None), lambda: send_order(None, "decode", 1)):
        with pytest.raises(LaunchError, match=refused):
            use()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ECONNABORTED, errno.EPERM])
def test_orders_are_taken_after_one_was_not_or_threads_were_used_up(
    server: ControlServer, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    accept, start, left = socket.socket.accept, threading.Thread.start, [2, 1]

    def no_descriptor(own: socket.socket) -> tuple[socket.socket, object]:
        if left[0]:
            left[0] -= 1
            raise OSError(number, os.strerror(number))
        return accept(own)

    def no_thread(own: threading.Thread) -> None:
        if left[1]:
            left[1] -= 1
            raise RuntimeError("can't start new thread")
        start(own)

    monkeypatch.setattr(socket.socket, "accept", no_descriptor)
    assert send_order(server.path, "decode", 1) == "decode: 1"  # was accepted before
    assert send_order(server.path, "decode", 2) == "decode: 2"
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    with pytest.raises(ControlError, match="can't start new thread"):
        send_order(server.path, "decode", 3)
    assert send_order(server.path, "decode", 4) == "decode: 4"
    assert left == [0, 0]


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    "line", [b"7", b"\xff", b"{}", b'{"role": "decode", "count": Infinity}', b"[" * 4000]
)
def test_what_is_no_order_is_told_as_that(server: ControlServer, line: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(30.0)
        connection.connect(str(server.path))
        connection.sendall(line + b"\n")
        with connection.makefile("rb") as lines:
            assert b"an order is" in lines.readline()


@pytest.mark.parametrize("said", [b"HTTP/1.1 400 Bad Request\r\n", b"7\n", b"{}\n"])
def test_another_service_at_the_path_is_named(folder: Path, said: bytes) -> None:
    folder.mkdir()
    path = folder / "other.sock"

    def answer(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with connection:
            connection.recv(4096)
            connection.sendall(said)

    with socket.socket(socket.AF_UNIX) as listening, ThreadPoolExecutor(1) as pool:
        listening.bind(str(path))
        listening.listen()
        answered = pool.submit(answer, listening)
        says = f"another service answers at {path}, with {said!r}: correct --control-socket"
        with pytest.raises(ControlError, match=re.escape(says)):
            send_order(path, "decode", 2)
        answered.result(30)


@pytest.mark.parametrize("waiting", [0, 1], ids=["silent", "full"])
def test_a_service_that_says_nothing_is_no_endless_wait(
    folder: Path, monkeypatch: pytest.MonkeyPatch, waiting: int
) -> None:
    monkeypatch.setattr(control, "_TAKEN_S", 0.2, raising=False)
    folder.mkdir()
    path = folder / "other.sock"
    with ThreadPoolExecutor(1) as pool, socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen(1 - waiting)
        others = [socket.socket(socket.AF_UNIX) for _ in range(waiting)]
        for other in others:
            other.connect(str(path))
        order = pool.submit(send_order, None, "decode", 2)
        why = r" \(Resource temp.*start it, or" if waiting else r" within 0\.2 s: .*service listens"
        with pytest.raises(ControlError, match=f"answers at {path}{why}.*correct --control-socket"):
            order.result(20)
        for other in others:
            other.close()


def test_a_socket_of_another_user_is_not_replaced(
    server: ControlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(socket.socket, "connect", refuse)
    with pytest.raises(LaunchError, match="another `tasuki serve` listens at"):
        ControlServer(server.path)
    assert server.path.exists()


def test_nobody_else_may_order(server: ControlServer, folder: Path) -> None:
    assert stat.S_IMODE(server.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_who_is_meant_must_be_clear(server: ControlServer, folder: Path) -> None:
    other = serving(folder / "other.sock")
    with pytest.raises(ControlError, match=r"several .* run: .*other\.sock"):
        send_order(None, "decode", 3)
    with pytest.raises(LaunchError, match="another `tasuki serve` listens at"):
        ControlServer(other.path)
    other.close()
    assert send_order(None, "decode", 3) == "decode: 3"
    server.close()
    with pytest.raises(ControlError, match="start it first"):
        send_order(None, "decode", 3)
    with pytest.raises(ControlError, match="start it, or correct"):
        send_order(server.path, "decode", 3)


def test_a_socket_that_was_left_behind_is_replaced(folder: Path) -> None:
    folder.mkdir()
    path = folder / "a.sock"
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
    assert path.exists()
    again = serving(path)
    assert send_order(path, "decode", 2) == "decode: 2"
    again.close()
    assert not path.exists()


def test_sockets_of_processes_that_are_gone_are_removed(folder: Path) -> None:
    folder.mkdir()
    names = (2**22, 2**22 + 1, 1, "mine")  # process ids are below 2**22
    gone, serves, starts, other = (folder / f"{name}.sock" for name in names)
    left = {path: socket.socket(socket.AF_UNIX) for path in (gone, serves, starts, other)}
    for path, bound in left.items():
        bound.bind(str(path))
        if path == serves:  # of a launcher in another container
            bound.listen()
        else:
            bound.close()
    made = ControlServer(None)
    assert set(folder.iterdir()) == {serves, starts, other, made.path}
    made.close()
    left[serves].close()


def test_an_order_that_ends_the_launcher_is_answered_too(folder: Path) -> None:
    def stop(role: str, count: int) -> str:
        raise KeyboardInterrupt

    def call(function: object) -> None:
        with pytest.raises(KeyboardInterrupt):
            function()  # type: ignore[operator]

    ending = ControlServer(folder / "a.sock")
    ending.begin(stop, call)
    with pytest.raises(ControlError, match="the launcher ends"):
        send_order(ending.path, "decode", 2)
    ending.close()


@pytest.mark.parametrize("reads", [False, True], ids=["resets", "closes"])
def test_a_launcher_that_ends_in_the_middle_is_told_as_that(folder: Path, reads: bool) -> None:
    folder.mkdir()
    path = folder / "a.sock"

    def end(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        connection.recv(4096 if reads else 1)  # to close without reading all resets the connection
        connection.close()

    with socket.socket(socket.AF_UNIX) as listening, ThreadPoolExecutor(1) as pool:
        listening.bind(str(path))
        listening.listen()
        ended = pool.submit(end, listening)
        with pytest.raises(ControlError, match=r"^`tasuki serve` ended before that was done$"):
            send_order(path, "decode", 2)
        ended.result(30)


def test_a_path_has_a_limit(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 110)
    says = f"--control-socket {path} has {len(str(path))} bytes, the limit is 107: choose a shorter"
    with pytest.raises(LaunchError, match=re.escape(says)):
        ControlServer(path)
    with pytest.raises(LaunchError, match=re.escape(says)):
        send_order(path, "decode", 2)


def test_a_file_that_is_no_socket_is_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_text("mine")
    with pytest.raises(LaunchError, match=r"notes exists and is no socket: choose another path"):
        ControlServer(path)
    assert path.read_text() == "mine"
    with pytest.raises(LaunchError, match=r"cannot listen at .*--control-socket, or another XDG_R"):
        ControlServer(path / "a.sock")


def test_an_order_that_comes_early_waits_for_the_start(folder: Path) -> None:
    early = ControlServer(folder / "a.sock")
    with ThreadPoolExecutor(1) as pool:
        order = pool.submit(send_order, early.path, "decode", 2)
        with pytest.raises(TimeoutError):
            order.result(0.2)
        early.begin(obey, lambda function: function())
        assert order.result(30) == "decode: 2"
    early.close()
    other = ControlServer(early.path)
    early.close()
    assert other.path.exists(), "a second close leaves another launcher's socket"
    other.close()


def test_an_order_that_comes_early_is_answered_by_a_launcher_that_ends(folder: Path) -> None:
    early = ControlServer(folder / "a.sock")
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(30.0)
        connection.connect(str(early.path))
        connection.sendall(b'{"role": "decode", "count": 2, "acknowledge": true}\n')
        with connection.makefile("rb") as lines:
            assert lines.readline() == b'{"taken": true}\n'
            early.close()
            assert b"the launcher ends" in lines.readline()


def test_the_socket_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(config: ServeConfig) -> None:
        pytest.fail("workers are started")

    monkeypatch.setattr(serve, "make_engine", start)
    path = tmp_path / ("x" * 110)
    with pytest.raises(LaunchError, match="the limit is 107"):
        serve.serve(ServeConfig(model="m", control_socket=path))
    runner = CliRunner()
    monkeypatch.setattr(machine, "choose_topology", start)
    done = runner.invoke(app, ["serve", "--control-socket", str(path)])
    assert isinstance(done.exception, LaunchError)
