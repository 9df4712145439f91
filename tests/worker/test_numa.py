"""A rank stays on the NUMA node of its GPU, unless the operator has chosen CPUs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.sysfs import eight_rails, gpu_address, write

from tasuki.worker import numa


def test_the_cpus_of_a_node_are_listed(tmp_path: Path) -> None:
    rails = eight_rails(tmp_path)
    assert numa.cpus_of_node(1, rails) == {*range(56, 112), *range(168, 224)}
    assert len(numa.all_cpus(rails)) == 224
    assert numa.cpus_of_node(7, rails) == set()


@pytest.fixture
def halves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, dict[int, set[int]]]:
    """An 8-rail node of four CPUs, all of them allowed, and what threads are bound to."""
    rails = eight_rails(tmp_path)
    write(rails / "devices/system/cpu/online", "0-3")
    write(rails / "devices/system/node/node0/cpulist", "0-1")
    write(rails / "devices/system/node/node1/cpulist", "2-3")
    bound: dict[int, set[int]] = {}
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(os, "sched_setaffinity", lambda thread, cpus: bound.update({thread: cpus}))
    monkeypatch.setattr(numa, "_prefer_memory_of", lambda node: bound.update({-1: {node}}))
    return rails, bound


def test_all_threads_and_the_memory_follow_the_gpu(
    halves: tuple[Path, dict[int, set[int]]],
) -> None:
    rails, bound = halves
    assert "2 CPUs and the memory of node 1" in numa.stay_near(gpu_address(5), rails)
    assert bound.pop(-1) == {1}
    assert os.getpid() in bound and set(map(frozenset, bound.values())) == {frozenset({2, 3})}


def test_restricted_cpus_are_left_alone(
    halves: tuple[Path, dict[int, set[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    rails, bound = halves
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 2})
    assert "restricted already" in numa.stay_near(gpu_address(5), rails)
    assert "not known" in numa.stay_near("", rails)
    assert not bound


@pytest.mark.system
def test_the_system_call_is_accepted() -> None:
    """In a child: a policy stays with its thread."""
    child = os.fork()
    if child == 0:
        problems: list[object] = []
        numa.log.warning = lambda *words: problems.append(words)  # type: ignore[method-assign]
        numa._prefer_memory_of(0)
        os._exit(1 if problems else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
