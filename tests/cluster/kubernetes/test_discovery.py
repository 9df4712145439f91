"""The router's discovery against a real API server: changes, an outage, and what it costs."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from api import ApiError
from cluster import MODEL, ROUTER, Cluster
from support.deployment import START_DEADLINE_S
from support.processes import Process
from support.waiting import free_port, idle_shares

Object = dict[str, Any]

NAMESPACE = "default"
SLICES = f"/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/endpointslices"
SERVICE = "fake-workers"
# Of a router with so many workers that nobody answers for, and while they change.
MOST_MB, MOST_GROWTH_MB = 120.0, 12.0
MOST_SHARE = 0.05  # of a core, while they do not change


def slice_of(name: str, hosts: list[str]) -> Object:
    endpoints = [
        {"addresses": [host], "nodeName": f"fake-{host.rsplit('.', 1)[1]}"} for host in hosts
    ]
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": name, "labels": {"kubernetes.io/service-name": SERVICE}},
        "addressType": "IPv4",
        "ports": [{"name": "grpc", "port": 7001}],
        "endpoints": endpoints,
    }


def put(cluster: Cluster, name: str, hosts: list[str]) -> None:
    body = slice_of(name, hosts)
    try:
        cluster.api.call("PUT", f"{SLICES}/{name}", body)
    except ApiError as error:
        assert error.code == 404, error
        cluster.api.post(SLICES, body)


class Router:
    """A router of its own, with one worker that serves and the Service's endpoints."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        port = free_port()
        model = str(cluster.model)
        self.worker = Process(
            "worker",
            ["worker", "--model", model, "--port", str(port), "--dtype", "float32"],
            folder / "worker.log",
        )
        self.worker.start()
        self.worker.wait_for_line("ready ", deadline_s=START_DEADLINE_S)
        arguments = [
            *("--model", f"{MODEL}={model}", "--port", "0", "--admin-port", "0"),
            *("--worker", f"127.0.0.1:{port}"),
            *("--discover", f"kubernetes:{NAMESPACE}/{SERVICE}:grpc"),
        ]
        self.process = Process("router", arguments, folder / "router.log", program=[str(ROUTER)])
        os.environ["KUBECONFIG"] = str(cluster.plane.kubeconfig)
        self.process.start()
        self.url = self.process.wait_for_line("listening on ", deadline_s=START_DEADLINE_S)
        found = re.search(r"http://(127\.0\.0\.1:\d+)/dashboard", self.process.output())
        assert found is not None, self.process.tail()
        self.admin = httpx.Client(base_url=f"http://{found[1]}", trust_env=False)

    def workers(self) -> dict[str, Object]:
        found = self.admin.get("/workers").json()["workers"]
        return {worker["address"]: worker for worker in found}

    def fakes(self) -> set[str]:
        return {address.split(":")[0] for address in self.workers() if address.startswith("10.99")}

    def memory_mb(self) -> float:
        return float(psutil.Process(self.process.pid).memory_info().rss) / 1e6

    def stop(self) -> None:
        self.admin.close()
        self.process.kill()
        self.worker.kill()


@pytest.fixture
def router(cluster: Cluster, tmp_path: Path) -> Iterator[Router]:
    for found in cluster.api.get(SLICES)["items"]:
        if found["metadata"]["labels"].get("kubernetes.io/service-name") == SERVICE:
            cluster.api.delete(f"{SLICES}/{found['metadata']['name']}")
    made = Router(cluster, tmp_path)
    yield made
    made.stop()


def test_changes_and_an_outage_of_the_api_server(cluster: Cluster, router: Router) -> None:
    real = next(iter(router.workers()))

    slices: dict[str, list[str]] = {}

    def change(number: int) -> None:
        name = f"fake-{number % 3}"
        slices[name] = [f"10.99.0.{1 + (number + index) % 40}" for index in range(5)]
        put(cluster, name, slices[name])

    def is_known() -> bool:
        return router.fakes() == {host for hosts in slices.values() for host in hosts}

    for number in range(100):
        change(number)
    cluster.await_condition(is_known, "the set after 100 changes")
    cluster.plane.kill_api_server()
    cluster.await_condition(
        lambda: "addresses stay" in router.process.output(), "the outage noticed"
    )
    assert is_known(), "the last set stays"
    cluster.plane.start_api_server()
    for number in range(100, 200):
        change(number)
    cluster.api.delete(f"{SLICES}/fake-0")
    del slices["fake-0"]
    cluster.await_condition(is_known, "the set after the outage")
    worker = router.workers()[real]
    assert worker["state"] == "ready"
    assert "worker lost" not in router.process.output(), "no stream has ended"


def test_two_hundred_endpoints_cost_little(cluster: Cluster, router: Router) -> None:
    hosts = [f"10.99.{1 + index // 100}.{1 + index % 100}" for index in range(200)]
    put(cluster, "fake-0", hosts[:100])
    put(cluster, "fake-1", hosts[100:])
    cluster.await_condition(lambda: router.fakes() == set(hosts), "200 endpoints")
    full_mb = router.memory_mb()
    shares = idle_shares(lambda: {"router": router.process.cpu_s()}, MOST_SHARE)
    for turn in range(20):
        put(cluster, "fake-0", hosts[:100] if turn % 2 else hosts[:50])
    put(cluster, "fake-0", [])
    put(cluster, "fake-1", [])
    cluster.await_condition(lambda: not router.fakes(), "no endpoint left")
    end_mb = router.memory_mb()
    print(f"router: {full_mb:.0f} MB with 200 endpoints, {end_mb:.0f} MB after 22 changes")
    print(f"router: {shares['router']:.1%} of a core with 200 endpoints that do not change")
    assert full_mb < MOST_MB
    assert end_mb - full_mb < MOST_GROWTH_MB
