"""Logs stay when they are needed, and do not pile up."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from tasuki.launch import serve
from tasuki.launch.config import ServeConfig
from tasuki.launch.errors import LaunchError
from tasuki.launch.logs import KEPT_FOLDERS, log_folder

NOBODY = 2**22 + 1  # beyond the largest process id


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TASUKI_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_they_go_after_a_clean_end() -> None:
    with log_folder(None) as logs:
        (logs.path / "router.log").write_text("x")
        logs.keep = False
    assert not logs.path.exists()


def test_they_stay_after_a_crash() -> None:
    with pytest.raises(ZeroDivisionError), log_folder(None) as logs:
        raise ZeroDivisionError
    assert logs.path.is_dir()


def test_a_folder_has_one_launcher_at_a_time(tmp_path: Path) -> None:
    wanted = tmp_path / "mine"
    taken = pytest.raises(LaunchError, match=r"another launcher writes to .*mine")
    with log_folder(wanted), taken, log_folder(wanted):
        pass
    with log_folder(wanted) as again:
        assert again.path == wanted


def test_a_folder_that_was_asked_for_stays(tmp_path: Path) -> None:
    with log_folder(tmp_path / "mine") as logs:
        logs.keep = False
    assert (tmp_path / "mine").is_dir()


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    says = "--log-dir DIR, or set TASUKI_CACHE"
    with pytest.raises(LaunchError, match=says), log_folder(tmp_path / "file" / "logs"):
        pass


def test_it_is_told_before_the_model_is_fetched(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    def fetch(model: str) -> Path:
        raise LaunchError(f"{model} is fetched")

    monkeypatch.setattr(serve, "make_engine", lambda config: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(serve, "resolve_model", fetch)
    (tmp_path / "file").write_text("")
    with pytest.raises(LaunchError, match="cannot write logs"):
        serve.serve(ServeConfig(model="m", log_dir=tmp_path / "file"))
    with pytest.raises(LaunchError, match="m is fetched"):
        serve.serve(ServeConfig(model="m"))
    assert list((cache / "logs").iterdir()) == [], "no process had written there"


def test_old_ones_are_removed_but_never_a_running_launchers(cache: Path) -> None:
    parent = cache / "logs"
    running = parent / "20200101-000000-1-a"
    running.mkdir(parents=True)
    # Also of launchers whose process id another process has: in a container it is always 1.
    old = [parent / f"20200102-0000{n:02}-{n % 2 or NOBODY}-a" for n in range(KEPT_FOLDERS + 5)]
    for folder in old:
        folder.mkdir()
    with log_folder(running), log_folder(None) as logs:
        left = sorted(parent.iterdir())
    assert running in left
    assert logs.path in left
    assert left[1:-1] == old[-KEPT_FOLDERS + 1 :]
