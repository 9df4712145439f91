"""The file that the router watches."""

from __future__ import annotations

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


def test_where_it_cannot_be_written_the_old_one_stays(tmp_path: Path) -> None:
    file = WorkersFile(tmp_path / "workers.txt")
    file.publish()
    file.put("mixed-0", "a:1")
    (tmp_path / "workers.txt.new").symlink_to("/dev/full")
    with pytest.raises(LaunchError, match=r"No space left on device.*--log-dir DIR"):
        file.put("mixed-1", "b:1")
    assert addresses(file.path) == ["a:1"]
