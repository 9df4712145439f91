"""Clusters on this machine, in network namespaces."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from support.on_ray import RayCluster
from support.ray_hosts import RayHosts


@pytest.fixture
def ray_cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., RayCluster]]:
    """Starts clusters of nodes with so many CPUs each, all at one address."""
    _require_ray()
    started: list[RayCluster] = []

    def start(*cpus: int) -> RayCluster:
        started.append(RayCluster(*cpus))
        _use(monkeypatch, started[-1])
        return started[-1]

    yield start
    for cluster in started:
        cluster.close()


@pytest.fixture
def ray_hosts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., RayHosts]]:
    """Starts clusters of hosts with so many CPUs each."""
    _require_ray()
    started: list[RayHosts] = []

    monkeypatch.setenv("UCX_TLS", "tcp")  # shared memory reaches across namespaces

    def start(*cpus: int) -> RayHosts:
        started.append(RayHosts(*cpus))
        _use(monkeypatch, started[-1].cluster)
        return started[-1]

    yield start
    for hosts in started:
        hosts.close()


def _require_ray() -> None:
    pytest.importorskip("ray", reason="ray is not installed: there is no wheel for this Python")


def _use(monkeypatch: pytest.MonkeyPatch, cluster: RayCluster) -> None:
    monkeypatch.setenv("TASUKI_CACHE", str(cluster.folder / "cache"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(cluster.folder))
