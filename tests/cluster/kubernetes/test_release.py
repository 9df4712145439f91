"""The chart on real nodes: it serves, scales, rolls over, and loses nothing by any of it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from cluster import NAMESPACE, PREFIX, Cluster, Object, names, values
from load import Load
from support.workload import known_requests

Install = Callable[..., Cluster]


def test_an_install_serves_and_moves_kv(installed: Install, tiny_model: Path) -> None:
    cluster = installed()
    roles = {p["metadata"]["labels"]["tasuki.dev/role"] for p in cluster.pods(component="worker")}
    assert roles == {"prefill", "decode"}
    client = cluster.client()
    for known in known_requests(tiny_model, 3, prompt_lengths=(16, 90, 150), steps=24):
        answer = client.complete(known.prompt_tokens, max_tokens=24)
        assert answer.tokens == known.tokens, known.name
    client.close()
    assert cluster.router_metric("tasuki_worker_kv_pulled_blocks_total", role="decode") > 0


def test_scaling_in_and_out_under_load_loses_nothing(installed: Install) -> None:
    cluster = installed()
    with Load(cluster) as load:
        load.await_ended(4)
        cluster.scale("decode", 3)
        cluster.await_rollout("decode")
        cluster.await_condition(
            lambda: cluster.router_metric("tasuki_worker_up", role="decode") == 3,
            "three decode workers known",
        )
        three = cluster.ready_pods(role="decode")
        nodes = {pod["spec"]["nodeName"] for pod in three}
        assert len(nodes) == min(3, len(cluster.kubelets)), "they are spread"
        load.await_ended(8)
        cluster.scale("decode", 1)
        cluster.await_condition(
            lambda: len(cluster.pods(role="decode")) == 1, "two workers' end", 120.0
        )
        load.await_ended(4)
    load.check()
    (left,) = cluster.pods(role="decode")
    for pod in three:
        if names([pod]) != names([left]):
            assert "drained" in cluster.log(pod, "worker"), "each ended by itself"


def test_a_rolling_update_of_everything_under_load_loses_nothing(installed: Install) -> None:
    cluster = installed()
    before = names(cluster.pods())
    with Load(cluster) as load:
        load.await_ended(4)
        again = {"podAnnotations": {"tests/revision": "2"}}
        installed(worker=again, router=again)
        cluster.await_condition(
            lambda: not before & names(cluster.pods()), "the old pods' end", 180.0
        )
        load.await_ended(4)
    load.check()


def test_the_routers_token_may_watch_slices_and_nothing_else(installed: Install) -> None:
    cluster = installed()
    account = f"system:serviceaccount:{NAMESPACE}:{PREFIX}-router"
    listed = cluster.kubectl("auth", "can-i", "--list", f"--as={account}", "--no-headers")
    rights = {}
    for line in listed.splitlines():
        resource, verbs = line.split()[0], re.findall(r"\[([^\]]*)\]", line)[-1]
        if not resource.startswith(("[", "self")):
            rights[resource] = set(verbs.split())
    # Kubernetes gives this right to every service account.
    rights.pop("clustertrustbundles.certificates.k8s.io", None)
    assert rights == {"endpointslices.discovery.k8s.io": {"get", "list", "watch"}}


@pytest.mark.parametrize(
    ("settings", "code", "says"),
    [
        (["--max-model-len=999999999"], 1, "max-model-len"),
        (["--host=192.0.2.77", "--preflight=strict"], 78, "192.0.2.77 is no address of this"),
    ],
    ids=["settings", "preflight"],
)
def test_a_worker_that_cannot_start_says_why(
    installed: Install, tiny_model: Path, settings: list[str], code: int, says: str
) -> None:
    cluster = installed()
    args = ["--dtype=float32", *settings]
    cluster.install(
        values(tiny_model, pools={"broken": {"role": "decode", "replicas": 1, "args": args}})
    )

    def ended() -> Object:
        for pod in cluster.pods(pool="broken"):
            for status in pod.get("status", {}).get("containerStatuses", []):
                return dict(status["lastState"].get("terminated", {}))
        return {}

    cluster.await_condition(ended, "the pod's last words", 120.0)
    assert says in ended()["message"], ended()
    assert ended()["exitCode"] == code
    assert cluster.ready_pods(pool="broken") == []
    assert cluster.ready_pods(pool="decode"), "the others serve"
