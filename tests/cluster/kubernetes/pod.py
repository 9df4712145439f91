"""One pod on a process kubelet: an address of its own, containers, status, end. A thread each."""

from __future__ import annotations

import base64
import json
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from api import Api, ApiError
from container import Container, Sandbox
from control_plane import kubeconfig
from pod_names import remove_name, set_name

Object = dict[str, Any]

_TICK_S = 0.1


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def delete_object(api: Api, meta: Object) -> bool:
    """Take a pod that has ended, or never began, out of the API server; whether it is gone."""
    gone = {
        "apiVersion": "v1",
        "kind": "DeleteOptions",
        "gracePeriodSeconds": 0,
        "preconditions": {"uid": meta["uid"]},
    }
    try:
        api.delete(f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}", gone)
    except ApiError as error:
        return error.code in (404, 409)
    return True


@dataclass(frozen=True)
class Node:
    """What pods know of their kubelet."""

    name: str
    host_ip: str
    api: Api
    folder: Path
    environment: dict[str, str]


class Pod:
    """Runs from its construction on.

    Args:
        node: Where.
        spec: The object, as bound.
        ip: Its address, free.
        on_gone: Called when it is deleted.
    """

    def __init__(self, node: Node, spec: Object, ip: str, on_gone: Callable[[Pod], None]) -> None:
        self._node, self._object, self.ip, self._on_gone = node, spec, ip, on_gone
        meta = spec["metadata"]
        self.name, self.uid, self._namespace = meta["name"], meta["uid"], meta["namespace"]
        self._path = f"/api/v1/namespaces/{self._namespace}/pods/{self.name}"
        self._ending = threading.Event()
        self._grace_s = spec["spec"].get("terminationGracePeriodSeconds", 30)
        self._phase, self._reported = "Pending", ""
        self._reported_ready = False
        self.containers: list[Container] = []
        subprocess.run(["ip", "addr", "add", f"{ip}/32", "dev", "lo"], check=False)
        set_name(spec["spec"], ip)
        threading.Thread(target=self._run, name=self.name, daemon=True).start()

    def end(self, grace_s: float | None) -> None:
        """It was deleted."""
        if grace_s is not None:
            self._grace_s = grace_s
        self._ending.set()

    def compare(self, found: Object) -> None:
        """With the API server's object: what others have changed is reported again.

        The node controller sets pods to not ready while their node is silent.
        """
        conditions = found.get("status", {}).get("conditions", [])
        ready = any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)
        if ready != self._reported_ready:
            self._reported = ""

    def _run(self) -> None:
        spec = self._object["spec"]
        sandbox = self._sandbox()
        for each in spec.get("initContainers", []):
            if not self._run_to_completion(Container(each, sandbox)):
                self._finish()
                return
        self.containers = [Container(each, sandbox) for each in spec["containers"]]
        self._phase = "Running"
        while not self._ending.wait(_TICK_S):
            for container in self.containers:
                container.tick()
            self._report()
        self._finish()

    def _sandbox(self) -> Sandbox:
        folders = {}
        for volume in self._object["spec"].get("volumes", []):
            if "emptyDir" in volume:
                folder = self._node.folder / "pods" / self.uid / volume["name"]
                folder.mkdir(parents=True)
                folders[volume["name"]] = folder
        environment = {**self._node.environment, "HOSTNAME": self.name}
        if self._object["spec"].get("automountServiceAccountToken", True):
            environment["KUBECONFIG"] = str(self._kubeconfig())
        logs = self._node.folder / "logs"
        return Sandbox(self.ip, environment, self._fields(), folders, logs, self.name, self._secret)

    def _secret(self, name: str, key: str) -> str:
        found = self._node.api.get(f"/api/v1/namespaces/{self._namespace}/secrets/{name}")
        return base64.b64decode(found["data"][key]).decode()

    def _kubeconfig(self) -> Path:
        """With a token of the pod's service account: it may do what that account may."""
        account = self._object["spec"].get("serviceAccountName", "default")
        path = f"/api/v1/namespaces/{self._namespace}/serviceaccounts/{account}/token"
        kind = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest"}
        token = self._node.api.post(path, {**kind, "spec": {"expirationSeconds": 7200}})
        file = self._node.folder / "pods" / f"{self.uid}.kubeconfig"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(kubeconfig(token["status"]["token"], self._namespace))
        return file

    def _fields(self) -> dict[str, str]:
        meta = self._object["metadata"]
        fields = {f"metadata.labels['{k}']": v for k, v in meta.get("labels", {}).items()}
        return fields | {
            "metadata.name": self.name,
            "metadata.namespace": self._namespace,
            "spec.nodeName": self._node.name,
            "status.podIP": self.ip,
            "status.hostIP": self._node.host_ip,
        }

    def _run_to_completion(self, container: Container) -> bool:
        """Whether it succeeded before the pod was deleted."""
        self.containers = [container]
        while not self._ending.wait(_TICK_S):
            had_process = container.process is not None
            container.tick()
            if had_process and container.process is None and container.last_exit:
                if container.last_exit["exitCode"] == 0:
                    return True
                self._report(container.last_exit["message"])
        return False

    def _report(self, why: str = "") -> None:
        running = self._phase == "Running"
        ready = running and all(c.ready for c in self.containers) and not self._ending.is_set()
        states = {
            "PodReadyToStartContainers": True,
            "Initialized": running,
            "ContainersReady": ready,
            "Ready": ready,
        }
        condition = [
            {"type": name, "status": str(is_so), "lastTransitionTime": now(), "message": why}
            for name, is_so in states.items()
        ]
        kind = "containerStatuses" if running else "initContainerStatuses"
        status = {
            "phase": self._phase,
            "podIP": self.ip,
            "podIPs": [{"ip": self.ip}],
            "hostIP": self._node.host_ip,
            "conditions": condition,
            kind: [container.status() for container in self.containers],
        }
        told = re.sub(r"\d{4}-\d\d-\d\dT\S+Z", "", json.dumps(status))
        if told != self._reported:
            try:
                self._node.api.patch(self._path + "/status", {"status": status})
                self._reported, self._reported_ready = told, ready
            except ApiError:
                return  # the API server is away: again with the next tick

    def _finish(self) -> None:
        """SIGTERM, SIGKILL after the grace period, then the object goes."""
        self._report()
        for container in self.containers:
            container.signal(signal.SIGTERM)
        deadline_s = time.monotonic() + self._grace_s
        while any(container.runs() for container in self.containers):
            if time.monotonic() > deadline_s:
                self.kill()
            time.sleep(_TICK_S)
        self._delete()
        subprocess.run(["ip", "addr", "del", f"{self.ip}/32", "dev", "lo"], check=False)
        remove_name(self.ip)
        self._on_gone(self)

    def _delete(self) -> None:
        while not delete_object(self._node.api, self._object["metadata"]):
            time.sleep(_TICK_S)

    def kill(self) -> None:
        """SIGKILL to all its processes."""
        for container in self.containers:
            container.signal(signal.SIGKILL)
