"""A kubelet whose pods are local processes: `python process_kubelet.py CONFIG.json`, with tests/ on
PYTHONPATH.

It registers a node with capacity and labels, keeps its lease, runs the pods that the scheduler
binds to it, and reports their status. It is a process of its own, so that tests can freeze it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from api import MERGE, Api, ApiError
from pod import Node, Pod, delete_object, now
from support.forks import start_fork_server

Object = dict[str, Any]

_POLL_S = 0.25
_LEASE_S = 5.0
_FIRST_ADDRESS = 10
_CAPACITY = {"cpu": "64", "memory": "256Gi", "pods": "200", "ephemeral-storage": "1Ti"}


class Kubelet:
    """One node.

    Args:
        node: Its name, address and folder.
        network: First three parts of its pods' addresses.
        labels: Of the node, besides the usual ones.
        capacity: Likewise, such as GPUs.
    """

    def __init__(
        self, node: Node, network: str, labels: dict[str, str], capacity: dict[str, str]
    ) -> None:
        self._node, self._network = node, network
        self._labels, self._capacity = labels, {**_CAPACITY, **capacity}
        self._pods: dict[str, Pod] = {}
        self._next = _FIRST_ADDRESS

    def run(self) -> None:
        """Register, then run pods until the process ends."""
        self._register()
        threading.Thread(target=self._keep_lease, name="lease", daemon=True).start()
        while True:
            try:
                self._look()
            except ApiError as error:
                print(error, flush=True)
            time.sleep(_POLL_S)

    def _register(self) -> None:
        name = self._node.name
        usual = {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux"}
        meta = {"name": name, "labels": {**usual, **self._labels}}
        api = self._node.api
        api.post("/api/v1/nodes", {"apiVersion": "v1", "kind": "Node", "metadata": meta})
        self._report_node()

    def _report_node(self) -> None:
        ready = {"type": "Ready", "status": "True", "reason": "KubeletReady"}
        times = {"lastHeartbeatTime": now(), "lastTransitionTime": now()}
        status = {
            "capacity": self._capacity,
            "allocatable": self._capacity,
            "conditions": [{**ready, **times}],
            "addresses": [{"type": "InternalIP", "address": self._node.host_ip}],
        }
        path = f"/api/v1/nodes/{self._node.name}/status"
        self._node.api.patch(path, {"status": status})

    def _keep_lease(self) -> None:
        leases = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
        name = self._node.name
        while True:
            renewed = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
            spec = {"holderIdentity": name, "leaseDurationSeconds": 40, "renewTime": renewed}
            try:
                self._node.api.patch(f"{leases}/{name}", {"spec": spec}, MERGE)
                self._report_node()
            except ApiError as error:
                if error.code == 404:
                    self._make_lease(leases, spec)
            time.sleep(_LEASE_S)

    def _make_lease(self, leases: str, spec: Object) -> None:
        kind = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease"}
        meta = {"name": self._node.name, "namespace": "kube-node-lease"}
        try:
            self._node.api.post(leases, {**kind, "metadata": meta, "spec": spec})
        except ApiError as error:
            print(error, flush=True)

    def _look(self) -> None:
        """Compare the pods that are bound here with those that run."""
        selector = f"/api/v1/pods?fieldSelector=spec.nodeName={self._node.name}"
        bound = {each["metadata"]["uid"]: each for each in self._node.api.get(selector)["items"]}
        for uid, each in bound.items():
            meta = each["metadata"]
            is_deleted = "deletionTimestamp" in meta
            if uid in self._pods:
                self._pods[uid].compare(each)
                if is_deleted:
                    self._pods[uid].end(meta.get("deletionGracePeriodSeconds"))
            elif is_deleted:  # bound and deleted between two looks, or ended since this one began
                delete_object(self._node.api, meta)
            else:
                self._pods[uid] = Pod(self._node, each, self._address(), self._forget)
        for uid, pod in list(self._pods.items()):
            if uid not in bound:
                pod.end(0.0)

    def _address(self) -> str:
        self._next += 1
        return f"{self._network}.{self._next}"

    def _forget(self, pod: Pod) -> None:
        self._pods.pop(pod.uid, None)

    def kill_all(self) -> None:
        """The node is switched off."""
        for pod in list(self._pods.values()):
            pod.kill()


def main() -> None:
    given = json.loads(Path(sys.argv[1]).read_text())
    folder = Path(given["folder"])
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    node = Node(
        name=given["node"],
        host_ip=f"{given['network']}.1",
        api=Api(given["url"], given["token"]),
        folder=folder,
        environment={**os.environ, **given["environment"]},
    )
    kubelet = Kubelet(node, given["network"], given["labels"], given["capacity"])
    start_fork_server(node.environment)  # by this thread: it ends with the one that starts it

    def bye(number: int, frame: object) -> None:
        kubelet.kill_all()
        os._exit(0)

    signal.signal(signal.SIGTERM, bye)
    kubelet.run()


if __name__ == "__main__":
    main()
