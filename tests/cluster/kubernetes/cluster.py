"""A cluster of process kubelets with the chart installed, and what tests do to it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml
from api import Api
from control_plane import ADMIN, TOOLS, URL, ControlPlane, run
from support.client import Client
from support.metrics import Metrics
from support.processes import REPOSITORY
from support.waiting import until

Object = dict[str, Any]

ROUTER = Path(os.environ.get("TASUKI_ROUTER", REPOSITORY / "target/debug/tasuki-router"))
"""With discovery by Kubernetes, as `make test-kubernetes` builds it."""
CHART = REPOSITORY / "deploy/helm/tasuki"
RELEASE = "demo"
PREFIX = f"{RELEASE}-tasuki"
NAMESPACE = "ml"
MODEL = "tiny"
READY_DEADLINE_S = 240.0


@dataclass
class Cluster:
    """Control plane, nodes and one release of the chart.

    Attributes:
        folder: For logs and state.
        router: The program `tasuki-router`, with discovery by Kubernetes.
        model: Folder of the model that is served.
    """

    folder: Path
    router: Path
    model: Path
    plane: ControlPlane = field(init=False)
    kubelets: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        plane = self.folder / "plane"
        plane.mkdir()
        self.plane = ControlPlane(plane)
        for name in ("tasuki", "tasuki-router"):
            self._make_program(name)

    @property
    def api(self) -> Api:
        return self.plane.api

    # -- nodes --

    def _make_program(self, name: str) -> None:
        """What images have on their PATH."""
        programs = self.folder / "programs"
        programs.mkdir(exist_ok=True)
        command = f"{sys.executable} -m tasuki" if name == "tasuki" else str(self.router)
        (programs / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        (programs / name).chmod(0o755)

    def add_node(self, number: int, labels: Mapping[str, str], gpus: int) -> str:
        """Start a kubelet and wait until its node is ready."""
        name = f"node-{number}"
        path = f"{self.folder / 'programs'}:{TOOLS}:{os.environ['PATH']}"
        python_path = f"{REPOSITORY / 'python'}:{REPOSITORY / 'tests'}"
        given = {
            "url": URL,
            "token": ADMIN,
            "node": name,
            "network": f"10.88.{number}",
            "labels": dict(labels),
            "capacity": {"nvidia.com/gpu": str(gpus)},
            "folder": str(self.folder / name),
            "environment": {
                "PATH": path,
                "PYTHONPATH": python_path,
                "OMP_NUM_THREADS": "1",
                "HF_HUB_OFFLINE": "1",
            },
        }
        config = self.folder / f"{name}.json"
        config.write_text(json.dumps(given))
        program = Path(__file__).parent / "process_kubelet.py"
        with (self.folder / f"{name}.log").open("ab") as log:
            self.kubelets[name] = subprocess.Popen(
                [sys.executable, str(program), str(config)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONPATH": python_path},
                start_new_session=True,
            )
        self.await_condition(lambda: self.node_is_ready(name), f"{name} Ready", 60.0)
        return name

    def node_is_ready(self, name: str) -> bool:
        nodes = self.api.get("/api/v1/nodes")["items"]
        return any(node["metadata"]["name"] == name and is_ready(node) for node in nodes)

    def signal_kubelet(self, name: str, number: signal.Signals) -> None:
        self.kubelets[name].send_signal(number)

    # -- the release --

    def kubectl(self, *words: str) -> str:
        config = f"--kubeconfig={self.plane.kubeconfig}"
        return run(str(TOOLS / "kubectl"), config, f"--namespace={NAMESPACE}", *words)

    def helm(self, *words: str) -> str:
        config = f"--kubeconfig={self.plane.kubeconfig}"
        return run(str(TOOLS / "helm"), config, f"--namespace={NAMESPACE}", *words)

    def install(self, values: Object) -> None:
        """Install the chart, or upgrade it to other values."""
        file = self.folder / "values.yaml"
        file.write_text(yaml.safe_dump(values))
        upgrade = ("upgrade", "--install", "--create-namespace", RELEASE, str(CHART))
        self.helm(*upgrade, "--values", str(file))

    def await_rollout(self, *names: str, deadline_s: float = READY_DEADLINE_S) -> None:
        """Wait until the Deployments of these pools, or of the router, are as they should be."""
        for name in names:
            words = ("rollout", "status", f"deployment/{PREFIX}-{name}")
            try:
                self.kubectl(*words, f"--timeout={deadline_s:.0f}s")
            except AssertionError as error:
                error.add_note(self.describe())
                raise

    def scale(self, pool: str, replicas: int) -> None:
        self.kubectl("scale", f"deployment/{PREFIX}-{pool}", f"--replicas={replicas}")

    @contextmanager
    def draining(self, node: str) -> Iterator[subprocess.Popen[str]]:
        """`kubectl drain`, begun; at the end the node may have pods again."""
        words = ("drain", node, "--delete-emptydir-data", "--timeout=240s")
        drain = subprocess.Popen(
            [str(TOOLS / "kubectl"), f"--kubeconfig={self.plane.kubeconfig}", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            yield drain
        finally:
            drain.kill()
            drain.wait()
            self.kubectl("uncordon", node)

    def pods(self, **labels: str) -> list[Object]:
        """Of the release, those that are deleted and still run included."""
        wanted = {f"tasuki.dev/{name}": value for name, value in labels.items()}
        found = self.api.get(f"/api/v1/namespaces/{NAMESPACE}/pods")["items"]
        return [pod for pod in found if wanted.items() <= pod["metadata"]["labels"].items()]

    def ready_pods(self, **labels: str) -> list[Object]:
        pods = self.pods(**labels)
        return [p for p in pods if is_ready(p) and "deletionTimestamp" not in p["metadata"]]

    def client(self) -> Client:
        """Of one router that is ready."""
        ready = self.ready_pods(component="router")
        assert ready, self.describe()
        return Client(f"http://{ready[0]['status']['podIP']}:8000", MODEL)

    def metrics(self, pod: Object) -> Metrics:
        url = f"http://{pod['status']['podIP']}:9090/metrics"
        return Metrics(httpx.get(url, timeout=10, trust_env=False).text)

    def router_metrics(self, name: str, **labels: str) -> dict[str, float]:
        """Of each router that is ready; 0 where a counter has counted nothing."""
        return {
            pod["metadata"]["name"]: sum(s.value for s in self.metrics(pod).find(name, **labels))
            for pod in self.ready_pods(component="router")
        }

    def router_metric(self, name: str, **labels: str) -> float:
        """The sum over the routers that are ready."""
        return sum(self.router_metrics(name, **labels).values())

    def log(self, pod: Object, container: str) -> str:
        """What a container has printed."""
        node, name = pod["spec"]["nodeName"], pod["metadata"]["name"]
        file = self.folder / node / "logs" / f"{name}.{container}.log"
        return file.read_text(errors="replace") if file.exists() else ""

    # -- waiting --

    def await_condition(
        self, holds: Callable[[], object], what: str, deadline_s: float = 60.0
    ) -> None:
        until(holds, lambda: f"{what}\n{self.describe()}", deadline_s=deadline_s, interval_s=0.2)

    def describe(self) -> str:
        """Pods, and the ends of their logs, for a failure's message."""
        try:
            text = self.kubectl("get", "pods,endpointslices", "--output=wide")
        except AssertionError as error:
            text = str(error)
        for file in sorted(self.folder.glob("node-*/logs/*.log")):
            lines = file.read_text(errors="replace").splitlines()[-6:]
            text += f"\n--- {file.name}\n" + "\n".join(lines)
        return text

    def stop(self) -> None:
        """End all pods, nodes and the control plane."""
        for kubelet in self.kubelets.values():
            kubelet.send_signal(signal.SIGCONT)
            kubelet.terminate()
        for kubelet in self.kubelets.values():
            try:
                kubelet.wait(timeout=10)
            except subprocess.TimeoutExpired:
                kubelet.kill()
        self.plane.stop()


def is_ready(found: Object) -> bool:
    """Whether a pod or a node says that it is."""
    conditions = found.get("status", {}).get("conditions", [])
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def names(pods: list[Object]) -> set[str]:
    return {pod["metadata"]["name"] for pod in pods}


def process_of(pod: Object) -> int:
    """The id of a worker's process."""
    name = f"--name={pod['metadata']['name']}"
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode().split()
        except OSError:
            continue
        if name in words and words[:1] != ["/bin/sh"]:
            return int(folder.name)
    raise AssertionError(f"no process has {name}")


def values(model: Path, **more: Any) -> Object:
    """Values for a tiny model on CPU workers that count as one GPU each."""
    given: Object = {
        "model": {
            "name": MODEL,
            "source": str(model),
            "mountPath": str(model),
            "volume": {"hostPath": {"path": str(model), "type": "Directory"}},
        },
        "worker": {
            "args": ["--dtype=float32", "--kv-memory=20000000"],
            "drainS": 60,
            "resources": {"limits": {"nvidia.com/gpu": "1"}},
        },
        "router": {
            "replicas": 1,
            "readinessGraceS": 1,
            "args": ["--role-preference=1000"],
            "resources": {},
        },
    }
    for key, value in more.items():
        given[key] = {**given.get(key, {}), **value} if isinstance(value, dict) else value
    return given
