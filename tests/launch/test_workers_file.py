"""The file that the router watches."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tasuki.launch.errors import LaunchError
from tasuki.launch.workers_file import WorkersFile


def addresses(path: Path) -> list[str]:
    return [line.partition("#")[0].strip() for line in path.read_text().splitlines()]


def test_it_is_empty_until_it_is_published(tmp_path: Path) -> None:
    file = WorkersFile(tmp_path / "workers.txt")
    assert addresses(file.path) == []  # a router may read it already
    file.put("mixed-0", "a:1")
    file.put("mixed-1", "b:1")
    assert addresses(file.path) == []
    file.publish()
    assert addresses(file.path) == ["a:1", "b:1"]


def test_it_has_every_workers_newest_address(tmp_path: Path) -> None:
    file = WorkersFile(tmp_path / "workers.txt")
    file.publish()
    file.put("prefill-0", "10.0.0.1:7001")
    file.put("decode-0", "10.0.0.2:7001")
    file.put("decode-0", "10.0.0.3:7002")
    assert addresses(file.path) == ["10.0.0.3:7002", "10.0.0.1:7001"]
    file.remove(["prefill-0", "unknown"])
    assert addresses(file.path) == ["10.0.0.3:7002"]


def test_it_is_replaced_whole(tmp_path: Path) -> None:
    file = WorkersFile(tmp_path / "workers.txt")
    file.publish()
    file.put("mixed-0", "a:1")
    with file.path.open() as opened:
        file.put("mixed-0", "b:1")
        assert opened.read().startswith("a:1")  # the old file, complete
    assert addresses(file.path) == ["b:1"]


def test_a_folder_that_was_removed_is_made_again(tmp_path: Path) -> None:
    file = WorkersFile(tmp_path / "logs" / "workers.txt")
    file.publish()
    file.put("mixed-0", "a:1")
    shutil.rmtree(file.path.parent)
    file.put("mixed-1", "b:1")
    assert addresses(file.path) == ["a:1", "b:1"]


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Callable[[], None]]:
    """Has the file's folder be full from the call on, until the end of the test."""
    scratch = tmp_path / "workers.txt.new"
    yield lambda: scratch.symlink_to("/dev/full")
    scratch.unlink(missing_ok=True)


def test_before_it_is_published_a_full_disk_is_an_error(
    tmp_path: Path, full_disk: Callable[[], None]
) -> None:
    file = WorkersFile(tmp_path / "workers.txt")
    file.put("mixed-0", "a:1")
    full_disk()
    with pytest.raises(LaunchError, match=r"No space left on device.*--log-dir DIR"):
        file.publish()


def test_a_full_disk_keeps_the_addresses_until_it_has_room(
    tmp_path: Path, full_disk: Callable[[], None], capsys: pytest.CaptureFixture[str]
) -> None:
    stale: list[bool] = []
    file = WorkersFile(tmp_path / "workers.txt", lambda: stale.append(True))
    file.put("mixed-0", "a:1")
    file.put("mixed-1", "b:1")
    file.publish()
    full_disk()
    file.put("mixed-0", "a:2")
    file.remove(["mixed-1"])
    file.retry()
    assert addresses(file.path) == ["a:1", "b:1"]
    assert len(stale) == 2
    assert capsys.readouterr().err.count("No space left on device") == 1
    (tmp_path / "workers.txt.new").unlink()
    file.retry()
    assert addresses(file.path) == ["a:2"]
    assert "has all workers again" in capsys.readouterr().err
    file.path.unlink()
    file.retry()
    assert not file.path.exists(), "nothing is left to write"
