"""Workers whose model is divided between pods: they meet by their names, and drain as one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cluster import PREFIX, Cluster, values
from load import Load
from support.workload import known_requests

Install = Callable[..., Cluster]
SECRET = "hosts"


@pytest.fixture
def divided(installed: Install, tiny_model: Path) -> Iterator[Cluster]:
    """One prefill worker over two pods, one decode worker in one."""
    cluster = installed()
    cluster.kubectl("create", "secret", "generic", SECRET, f"--from-literal=key={'k' * 32}")
    two = {"role": "prefill", "replicas": 1, "hosts": 2, "nodesKey": {"secretName": SECRET}}
    cluster.install(values(tiny_model, pools={"prefill": two}))
    await_both(cluster)
    yield cluster
    cluster.kubectl("delete", "secret", SECRET)


def await_both(cluster: Cluster) -> None:
    """Wait until the worker serves, and both of its pods say so."""
    for name in ("prefill", "prefill-host1"):
        words = ("rollout", "status", f"statefulset/{PREFIX}-{name}", "--timeout=240s")
        try:
            cluster.kubectl(*words)
        except AssertionError as error:
            error.add_note(cluster.describe())
            raise
    cluster.await_condition(
        lambda: cluster.router_metric("tasuki_worker_up", role="prefill") == 1, "it is known"
    )


def test_a_worker_over_two_pods_serves_and_drains_as_one(
    divided: Cluster, tiny_model: Path
) -> None:
    cluster = divided
    pods = {pod["metadata"]["name"] for pod in cluster.ready_pods(role="prefill")}
    assert pods == {f"{PREFIX}-prefill-0", f"{PREFIX}-prefill-host1-0"}
    assert cluster.router_metric("tasuki_worker_up") == 2, "the other pod is no worker"
    client = cluster.client()
    for known in known_requests(tiny_model, 3, prompt_lengths=(16, 90, 150), steps=24, seed=3):
        answer = client.complete(known.prompt_tokens, max_tokens=24)
        assert answer.tokens == known.tokens, known.name
    client.close()
    assert cluster.router_metric("tasuki_worker_kv_pulled_blocks_total", role="decode") > 0

    (other,) = cluster.pods(component="worker-host")
    with Load(cluster) as load:
        load.await_ended(4)
        cluster.kubectl("delete", "pod", other["metadata"]["name"], "--wait=false")

        def is_again() -> bool:
            pods = cluster.ready_pods(component="worker-host")
            return [p["metadata"]["uid"] for p in pods] not in ([], [other["metadata"]["uid"]])

        cluster.await_condition(is_again, "the worker serves again", 240.0)
        await_both(cluster)
        load.await_ended(4)
    load.check()
    (first,) = cluster.pods(role="prefill", component="worker")
    assert "host 1 was told to end: the worker drains" in cluster.log(first, "worker")
