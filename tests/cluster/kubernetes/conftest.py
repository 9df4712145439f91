"""One cluster for all tests of this folder; `make test-kubernetes` builds what it needs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from cluster import RELEASE, ROUTER, Cluster, values
from control_plane import enter_network_namespace, missing_programs, own_hosts_file

NODES = int(os.environ.get("TASUKI_CLUSTER_NODES", "2"))
GPUS = 4  # of each node


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """In order of the files; all share the cluster."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.cluster)
            item.add_marker(pytest.mark.system)
            item.add_marker(pytest.mark.timeout(1200))


@pytest.fixture(scope="session")
def network() -> None:
    """From now on this process is in a network namespace of its own."""
    if missing := missing_programs():
        pytest.skip(f"{', '.join(missing)} not there: `make cluster-tools` builds them")
    if not ROUTER.exists():
        pytest.skip(f"no {ROUTER}: `make test-kubernetes` builds it")
    if os.geteuid() != 0:
        pytest.skip("a network namespace takes root")
    enter_network_namespace()


@pytest.fixture(scope="session")
def cluster(
    network: None, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """Control plane and nodes in two racks, nothing installed."""
    folder = tmp_path_factory.mktemp("cluster")
    own_hosts_file(folder)
    made = Cluster(folder, ROUTER, tiny_model)
    try:
        for number in range(1, NODES + 1):
            made.add_node(number, {"topology.kubernetes.io/rack": f"r{number % 2}"}, GPUS)
        yield made
    finally:
        made.stop()


@pytest.fixture(scope="session")
def release(cluster: Cluster) -> Iterator[Cluster]:
    """At the end the release goes, and all of its objects with it."""
    yield cluster
    cluster.helm("uninstall", RELEASE, "--wait")
    cluster.await_condition(lambda: not cluster.pods(), "the pods' end", 120.0)


@pytest.fixture
def installed(release: Cluster, tiny_model: Path) -> Callable[..., Cluster]:
    """Installs the chart with further values, or brings it back to them, and waits until ready."""

    def install(**more: object) -> Cluster:
        release.install(values(tiny_model, **more))
        release.await_rollout("prefill", "decode", "router")
        return release

    return install
