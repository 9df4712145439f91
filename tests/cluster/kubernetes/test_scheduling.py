"""What the scheduler and an operator decide: who gets a GPU, which role a worker has."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable

import httpx
from cluster import Cluster, Object, names, process_of
from load import Load

Install = Callable[..., Cluster]
# A pod that was just refused is not tried again for a second: it would lose to any other.
SCHEDULERS_BACKOFF_S = 3.0


def why_unscheduled(pod: Object) -> str:
    """What the scheduler says of a pod that has no node; empty: nothing yet."""
    conditions = pod.get("status", {}).get("conditions", [])
    return " ".join(c.get("message", "") for c in conditions if c["type"] == "PodScheduled")


def test_gpus_are_counted_and_freed_ones_go_by_priority(installed: Install) -> None:
    """Workers of half a node each: one more than there is room for, and one that comes back."""
    cluster = installed()
    for name, value in (("tasuki-decode", "1000"), ("tasuki-prefill", "100")):
        rank = (f"--value={value}", "--preemption-policy=Never")
        cluster.kubectl("create", "priorityclass", name, *rank)
    room = 2 * len(cluster.kubelets)
    installed(
        pools={
            "prefill": {"priorityClassName": "tasuki-prefill", "replicas": room - 1},
            "decode": {"priorityClassName": "tasuki-decode"},
        },
        worker={
            "resources": {"limits": {"nvidia.com/gpu": "2"}},
            "strategy": {"rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}},
        },
    )
    cluster.scale("prefill", room)

    def waiting(role: str) -> list[Object]:
        return [p for p in cluster.pods(role=role) if "nodeName" not in p["spec"]]

    def is_refused(role: str) -> bool:
        return any("Insufficient nvidia.com/gpu" in why_unscheduled(p) for p in waiting(role))

    cluster.await_condition(lambda: is_refused("prefill"), "one worker without a GPU")
    (pending,) = waiting("prefill")
    assert len(cluster.ready_pods(component="worker")) == room

    # Its end takes until both have waited for longer than the scheduler's backoff.
    (decode,) = cluster.ready_pods(role="decode")
    worker = process_of(decode)
    os.kill(worker, signal.SIGSTOP)
    try:
        cluster.kubectl("delete", "pod", decode["metadata"]["name"], "--wait=false")
        cluster.await_condition(lambda: is_refused("decode"), "the new decode worker refused")
        refused_s = time.monotonic()
        cluster.await_condition(
            lambda: time.monotonic() > refused_s + SCHEDULERS_BACKOFF_S, "the backoff"
        )
    finally:
        os.kill(worker, signal.SIGCONT)
    cluster.await_condition(
        lambda: cluster.ready_pods(role="decode"), "the freed GPUs for decode", 120.0
    )
    assert names(waiting("prefill")) == names([pending]), "prefill goes on waiting"


def test_a_worker_changes_its_role_under_load(installed: Install) -> None:
    cluster = installed(
        pools={"prefill": {"replicas": 2}},
        router={"args": ["--role-preference=1000", "--admin-port=0"]},
    )
    (router,) = cluster.ready_pods(component="router")
    found = re.search(r"http://(127\.0\.0\.1:\d+)/dashboard", cluster.log(router, "router"))
    assert found is not None
    admin = httpx.Client(base_url=f"http://{found[1]}", trust_env=False)

    def ready(role: str) -> list[Object]:
        workers = admin.get("/workers").json()["workers"]
        return [each for each in workers if each["role"] == role and each["state"] == "ready"]

    cluster.await_condition(lambda: len(ready("prefill")) == 2, "two of prefill")
    with Load(cluster) as load:
        load.await_ended(4)
        moved = ready("prefill")[0]["id"]
        ordered = admin.post(f"/workers/{moved}/role", json={"role": "decode"})
        assert ordered.status_code in (200, 202), ordered.text
        cluster.await_condition(lambda: len(ready("decode")) == 2, "two of decode")
        assert cluster.router_metric("tasuki_worker_up", role="decode") == 2
        load.await_ended(8)
    load.check()
    admin.close()
