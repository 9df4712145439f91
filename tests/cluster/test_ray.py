"""`tasuki serve --on ray` on a cluster of three nodes, by `make test-cluster`."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.client import Client
from support.on_ray import SETTINGS, RayCluster, await_end, scale, workers
from support.processes import Process
from support.serving import wait_for_url
from support.waiting import until

pytestmark = [pytest.mark.system, pytest.mark.cluster, pytest.mark.timeout(900)]

INFEASIBLE_S = 5.0


def answer_of(cluster: RayCluster, process: Process) -> list[int]:
    client = Client(wait_for_url(process), "llama")
    try:
        return cluster.namespace.run(client.complete, "gong bast", max_tokens=20).tokens
    finally:
        client.close()


def await_back(process: Process, name: str, times: int = 1) -> None:
    until(lambda: process.output().count(f"{name} is back") == times, process.tail, deadline_s=180)


def await_placement(cluster: RayCluster, process: Process) -> None:
    """Until the router, which looks for workers every second, has those that are back."""
    client = Client(wait_for_url(process), "llama")

    def is_ready() -> bool:
        return cluster.namespace.run(client.http.get, "/health").status_code == 200

    try:
        until(is_ready, process.tail, deadline_s=10)
    finally:
        client.close()


def free_cpus(cluster: RayCluster) -> float:
    return float(cluster.look()["free_cpus"])


def test_faults(ray_cluster: Callable[..., RayCluster], tiny_model: Path) -> None:
    """An actor, a node, the driver die: answers stay the same, no process is left behind."""
    cluster = ray_cluster(2, 2)
    settings = ("--model", str(tiny_model), *SETTINGS, "--strict-roles")
    alone = cluster.serve(*settings, on_ray=False)
    tokens = answer_of(cluster, alone)
    alone.signal(signal.SIGINT)
    assert alone.wait(deadline_s=60) == 0, alone.tail()

    process = cluster.serve(*settings)
    assert answer_of(cluster, process) == tokens
    (group,) = cluster.look()["groups"]
    assert len(set(group)) == 1  # pack

    # A worker's process dies; its actor is replaced, too.
    killed = workers()["decode-0"]
    killed.kill()
    await_back(process, "decode-0")
    await_placement(cluster, process)
    assert answer_of(cluster, process) == tokens

    # An actor dies, and the worker in it; prefill-0 serves alone unless roles are strict.
    killed = workers()["prefill-0"]
    actor = killed.parent()
    assert actor is not None
    actor.kill()
    await_end([killed])
    await_back(process, "prefill-0")
    await_placement(cluster, process)
    assert answer_of(cluster, process) == tokens
    assert cluster.look()["groups"] == [group]  # in the same bundle

    # A node dies, with both workers: both are started again on the other one.
    lost = list(workers().values())
    cluster.look(f"kill {group[0]}")
    await_end(lost)
    await_back(process, "prefill-0", times=2)
    await_back(process, "decode-0", times=2)
    await_placement(cluster, process)
    assert answer_of(cluster, process) == tokens
    (moved,) = cluster.look()["groups"]
    assert len(set(moved)) == 1
    assert set(moved) != set(group)

    # The driver dies: all ends with it, and the cluster is free again.
    left = [*workers().values(), *process.descendants()]
    process.kill()
    await_end(left)
    until(lambda: free_cpus(cluster) == 2, "free CPUs", deadline_s=60, interval_s=0.5)


def test_places(ray_cluster: Callable[..., RayCluster], tiny_model: Path) -> None:
    """Spread, scaling, Ctrl-C, and what has no room."""
    cluster = ray_cluster(2, 1)
    settings = ("--model", str(tiny_model), *SETTINGS)
    process = cluster.serve(*settings, "--spread", "strict-spread")
    tokens = answer_of(cluster, process)
    (group,) = cluster.look()["groups"]
    assert len(set(group)) == 2

    # No third node for a worker that wants one of its own; the deployment goes on.
    refused = scale("decode", "2")
    assert refused.returncode == 1
    assert "has no room for decode-1 (1 CPU each), each on a node of its own" in refused.stderr
    assert answer_of(cluster, process) == tokens
    everything = [*workers().values(), *process.descendants()]
    process.signal(signal.SIGINT)
    assert process.wait(deadline_s=60) == 0, process.tail()
    await_end(everything)

    # By role: decode workers are apart from one another, prefill is anywhere.
    process = cluster.serve(*settings, "--spread", "decode=spread")
    assert answer_of(cluster, process) == tokens
    assert scale("decode", "2").stdout == "1 prefill + 2 decode: 3 workers, 2 before\n"
    assert free_cpus(cluster) == 0
    assert sorted(workers()) == ["decode-0", "decode-1", "prefill-0"]
    assert answer_of(cluster, process) == tokens
    assert scale("decode", "1").stdout == "1 prefill + 1 decode: 2 workers, 3 before\n"
    assert sorted(workers()) == ["decode-0", "prefill-0"]
    until(lambda: free_cpus(cluster) == 1, "a free CPU", deadline_s=30, interval_s=0.5)
    assert answer_of(cluster, process) == tokens
    process.signal(signal.SIGTERM)
    assert process.wait(deadline_s=60) == 0, process.tail()
    until(lambda: free_cpus(cluster) == 3, "free CPUs", deadline_s=30, interval_s=0.5)

    # What has no room is said within seconds, with what was asked and what there is.
    for asked, says in (
        (("--mixed", "2", "--worker-cpus", "2"), r"mixed-0, mixed-1 \(2 CPU each\); its nodes"),
        (("--mixed", "4"), r"mixed-0, mixed-1, mixed-2, mixed-3 \(1 CPU each\); its nodes"),
        (
            ("--mixed", "3", "--spread", "strict-spread"),
            r"mixed-0, mixed-1, mixed-2 \(1 CPU each\), each on a node of its own; its nodes",
        ),
    ):
        process = cluster.serve(*settings, *asked)
        process.wait_for_line("tasuki: dtype", deadline_s=120)
        begun_s = time.monotonic()
        assert process.wait(deadline_s=60) == 1
        took_s = time.monotonic() - begun_s
        assert re.search(rf"the Ray cluster has no room for {says}", process.output())
        assert took_s < INFEASIBLE_S
        print(f"no room for {' '.join(asked)}: said after {took_s:.1f} s")
    assert free_cpus(cluster) == 3
    assert not workers()
