"""The control groups of a process, as the kernel lists them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasuki.control_groups import folders

DOCKER_1 = "12:cpu,cpuacct:/docker/7f\n11:memory:/docker/7f\n1:name=systemd:/docker/7f\n0::/\n"
UNIT_1 = "11:memory:/a.slice/b.service\n10:cpu,cpuacct:/a.slice\n0::/a.slice/b.service\n"
LAST = "memory/a.slice/b.service"


@pytest.mark.parametrize(
    ("own", "there", "found"),
    [
        ("0::/\n", [], ["."]),
        ("0::/a.slice/b.service\n", ["a.slice/b.service"], [".", "a.slice", "a.slice/b.service"]),
        ("0::/../7f\n", ["7f"], ["."]),
        (DOCKER_1, ["memory", "cpu"], [".", "memory"]),
        (UNIT_1, ["memory/a.slice/b.service"], [".", "memory", "memory/a.slice", LAST]),
        ("", ["memory"], [".", "memory"]),
    ],
    ids=["container", "unit", "outside", "docker 1", "unit 1", "unknown"],
)
def test_each_group_is_found(tmp_path: Path, own: str, there: list[str], found: list[str]) -> None:
    for name in there:
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "proc").write_text(own)
    groups = folders("memory", tmp_path, tmp_path / "proc")
    assert sorted(str(group.relative_to(tmp_path)) for group in groups) == found
