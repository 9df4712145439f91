"""Orders of `tasuki scale` over the launcher's socket."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasuki.launch.control import ControlError, ControlServer, send_order
from tasuki.launch.errors import LaunchError


def obey(role: str, count: int) -> str:
    if role != "decode":
        raise LaunchError(f"{role!r} is no role")
    return f"{role}: {count}"


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    base = tmp_path_factory.mktemp("s")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(base))
    return base / "tasuki"


@pytest.fixture
def server(folder: Path) -> Iterator[ControlServer]:
    made = ControlServer(None, obey, lambda function: function())
    yield made
    made.close()


def test_an_order_is_answered(server: ControlServer, folder: Path) -> None:
    assert server.path == folder / f"{os.getpid()}.sock"
    assert send_order(None, "decode", 3) == "decode: 3"
    with pytest.raises(ControlError, match="'both' is no role"):
        send_order(server.path, "both", 3)
    assert send_order(server.path, "decode", 1) == "decode: 1"


def test_nobody_else_may_order(server: ControlServer, folder: Path) -> None:
    assert stat.S_IMODE(server.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_who_is_meant_must_be_clear(server: ControlServer, folder: Path) -> None:
    other = ControlServer(folder / "other.sock", obey, lambda function: function())
    with pytest.raises(ControlError, match=r"several .* run: .*other\.sock"):
        send_order(None, "decode", 3)
    with pytest.raises(LaunchError, match="another `tasuki serve` listens at"):
        ControlServer(other.path, obey, lambda function: function())
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
    again = ControlServer(path, obey, lambda function: function())
    assert send_order(path, "decode", 2) == "decode: 2"
    again.close()
    assert not path.exists()


def test_an_order_that_ends_the_launcher_is_answered_too(folder: Path) -> None:
    def stop(role: str, count: int) -> str:
        raise KeyboardInterrupt

    def call(function: object) -> None:
        with pytest.raises(KeyboardInterrupt):
            function()  # type: ignore[operator]

    ending = ControlServer(folder / "a.sock", stop, call)
    with pytest.raises(ControlError, match="the launcher ends"):
        send_order(ending.path, "decode", 2)
    ending.close()


def test_a_path_has_a_limit(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="the limit is 107"):
        ControlServer(tmp_path / ("x" * 110), obey, lambda function: function())
