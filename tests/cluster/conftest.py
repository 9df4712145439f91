"""Clusters on this machine, in network namespaces."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from support.on_ray import RayCluster


@pytest.fixture
def ray_cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., RayCluster]]:
    """Starts clusters of nodes with so many CPUs each."""
    pytest.importorskip("ray", reason="ray is not installed: there is no wheel for this Python")
    started: list[RayCluster] = []

    def start(*cpus: int) -> RayCluster:
        started.append(RayCluster(*cpus))
        monkeypatch.setenv("TASUKI_CACHE", str(started[-1].folder / "cache"))
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(started[-1].folder))
        return started[-1]

    yield start
    for cluster in started:
        cluster.close()
