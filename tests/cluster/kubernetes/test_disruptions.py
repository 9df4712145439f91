"""What happens to nodes and processes under load: drains, a silent kubelet, a killed worker."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest
from cluster import NAMESPACE, PREFIX, Cluster, Object, is_ready, names, process_of
from load import Load

Install = Callable[..., Cluster]
TWO = {
    "pools": {"prefill": {"replicas": 2}, "decode": {"replicas": 2}},
    "router": {"replicas": 2},
}


def is_on(pod: Object, node: str) -> bool:
    return bool(pod["spec"].get("nodeName") == node)


def test_every_node_in_turn_is_drained_under_load(installed: Install) -> None:
    """Once the first is drained, all of two nodes' pods are on the second."""
    cluster = installed(**TWO)
    drained = 0
    with Load(cluster) as load:
        load.await_ended(4)
        for node in cluster.kubelets:
            before = {p["metadata"]["name"] for p in cluster.pods() if is_on(p, node)}
            with cluster.draining(node) as drain:
                said, _ = drain.communicate(timeout=260)
                assert drain.returncode == 0, f"{said}\n{cluster.describe()}"
                cluster.await_rollout("prefill", "decode", "router")
                assert not any(is_on(pod, node) for pod in cluster.ready_pods())
                load.await_ended(4)
            drained += bool(before - names(cluster.pods()))
    load.check()
    assert drained >= 2, "nodes that had pods"


def test_a_drain_waits_for_the_only_worker_to_be_replaced(installed: Install) -> None:
    cluster = installed()
    (decode,) = cluster.ready_pods(role="decode")
    with Load(cluster) as load:
        load.await_ended(2)
        with cluster.draining(decode["spec"]["nodeName"]) as drain:
            assert drain.stdout is not None
            refused = next((line for line in drain.stdout if "disruption budget" in line), "")
            assert "will retry" in refused
            load.await_ended(2)
            assert names([decode]) <= names(cluster.ready_pods())
            pools = [f"deployment/{PREFIX}-{name}" for name in ("prefill", "decode", "router")]
            cluster.kubectl("rollout", "restart", *pools)
            said, _ = drain.communicate(timeout=260)
            assert drain.returncode == 0, f"{said}\n{cluster.describe()}"
            cluster.await_rollout("prefill", "decode", "router")
            load.await_ended(4)
    load.check()


def test_a_budget_keeps_one_worker_of_a_pool(installed: Install) -> None:
    cluster = installed(pools={"decode": {"replicas": 2}})
    pods = sorted(names(cluster.ready_pods(role="decode")))
    path = f"/apis/policy/v1/namespaces/{NAMESPACE}/poddisruptionbudgets/{PREFIX}-decode"
    cluster.await_condition(
        lambda: cluster.api.get(path)["status"]["disruptionsAllowed"] == 1, "a disruption allowed"
    )

    def evict(name: str) -> None:
        meta = {"name": name, "namespace": NAMESPACE}
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": meta}
        cluster.api.post(f"/api/v1/namespaces/{NAMESPACE}/pods/{name}/eviction", body)

    evict(pods[0])
    with pytest.raises(Exception, match="429"):
        evict(pods[1])
    cluster.await_rollout("decode")


def test_a_silent_kubelet_ends_no_stream(installed: Install) -> None:
    cluster = installed(router={"replicas": 2})
    (decode,) = cluster.ready_pods(role="decode")
    node, address = decode["spec"]["nodeName"], decode["status"]["podIP"]
    slices = f"/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/endpointslices"

    def is_ready_in_slices() -> bool:
        endpoints = [e for s in cluster.api.get(slices)["items"] for e in s["endpoints"]]
        (found,) = [e for e in endpoints if e["addresses"] == [address]]
        return bool(found["conditions"]["ready"])

    with Load(cluster) as load:
        load.await_ended(2)
        cluster.signal_kubelet(node, signal.SIGSTOP)
        try:
            cluster.await_condition(
                lambda: not cluster.node_is_ready(node), "the node NotReady", 90.0
            )
            cluster.await_condition(lambda: not is_ready_in_slices(), "ready=false", 30.0)
            load.await_ended(6)
        finally:
            cluster.signal_kubelet(node, signal.SIGCONT)
        cluster.await_condition(lambda: cluster.node_is_ready(node), "the node back", 60.0)
        cluster.await_condition(is_ready_in_slices, "ready again", 30.0)
        load.await_ended(2)
    load.check()
    assert names(cluster.pods(role="decode")) == {decode["metadata"]["name"]}


def test_a_killed_worker_is_restarted_and_rejoins(installed: Install) -> None:
    cluster = installed()
    (decode,) = cluster.ready_pods(role="decode")
    name = decode["metadata"]["name"]
    with Load(cluster) as load:
        load.await_ended(2)
        os.kill(process_of(decode), signal.SIGKILL)

        def restarted() -> bool:
            (pod,) = cluster.pods(role="decode")
            status = pod["status"]["containerStatuses"][0]
            return bool(status["restartCount"] == 1 and is_ready(pod))

        cluster.await_condition(restarted, "the pod's restart", 120.0)
        cluster.await_condition(
            lambda: cluster.router_metric("tasuki_worker_up", role="decode") == 1, "it rejoins"
        )
        load.await_ended(4)
    assert load.outcomes.failures == []
    assert load.outcomes.resumed > 0
    assert cluster.router_metric("tasuki_retries_total") > 0
    assert names(cluster.pods(role="decode")) == {name}
