"""Nodes of a Ray cluster on hosts of their own: network namespaces.

head 10.99.0.1 ══ host2 ══ 10.99.0.2        the head passes packets on between the others
               ══ host3 ══ 10.99.0.3
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import psutil

from support.namespace import Namespace
from support.on_ray import RayCluster
from support.processes import environment
from support.waiting import until

HEAD = "10.99.0.1"
_JOIN_S = 120.0


class RayHost:
    """A host with one node of a cluster.

    Args:
        cluster: Of the head.
        number: Of the host, from 2.
        cpus: Of its node.
    """

    def __init__(self, cluster: RayCluster, number: int, cpus: int) -> None:
        self.address = f"10.99.0.{number}"
        self.namespace = Namespace()
        self._cluster, self._cpus = cluster, cpus
        self._device = f"host{number}"
        self._starts = 0
        self._process: subprocess.Popen[bytes] | None = None
        near, far = cluster.namespace, self.namespace
        near.ip(f"link add {self._device} type veth peer name eth0 netns {far.path()}")
        far.ip(f"addr add {self.address}/32 dev eth0")
        self.heal()

    def heal(self) -> None:
        """Connect it with the others."""
        self.namespace.ip(
            "link set eth0 up",
            f"route replace {HEAD}/32 dev eth0",
            f"route replace 10.99.0.0/24 via {HEAD} dev eth0",
        )
        self._cluster.namespace.ip(
            f"link set {self._device} up",
            f"route replace {self.address}/32 dev {self._device} src {HEAD}",
        )

    def start(self) -> None:
        """Start its node, and wait until the cluster has it."""
        self._starts += 1
        folder = self._cluster.folder / f"{self._device}-{self._starts}"
        folder.mkdir()
        words = {
            "address": self._cluster.address,
            "node-ip-address": self.address,
            "num-cpus": self._cpus,
            "object-store-memory": 80 * 1024**2,
            "temp-dir": folder,
        }
        flags = [word for name, value in words.items() for word in (f"--{name}", str(value))]
        settings = {
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_raylet_start_wait_time_s": "120",
            "RAY_worker_niceness": "0",
        }
        self._process = self.namespace.run(
            subprocess.Popen,
            [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *flags],
            env=environment(**settings),
            stdin=subprocess.DEVNULL,
            stdout=(folder / "node.log").open("wb"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        until(
            lambda: self.address in self._cluster.look()["alive"].values(),
            lambda: (folder / "node.log").read_text(),
            deadline_s=_JOIN_S,
            interval_s=0.5,
        )

    def lose(self) -> None:
        """Cut its cable, and end all that runs there: as a host without power."""
        self._cluster.namespace.ip(f"link set {self._device} down")
        self.kill()

    def kill(self) -> None:
        """End all that runs there."""
        if self._process is None:
            return
        with contextlib.suppress(psutil.NoSuchProcess):
            family = psutil.Process(self._process.pid).children(recursive=True)
            for each in (*family, psutil.Process(self._process.pid)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
        self._process.wait(30)


class RayHosts:
    """A cluster with a node on each of some hosts.

    Args:
        cpus: Of each node; the head, where `tasuki serve` runs, has none.
    """

    def __init__(self, *cpus: int) -> None:
        self.cluster = RayCluster(host=HEAD, devices=[f"addr add {HEAD}/32 dev lo"])
        forward = Path("/proc/sys/net/ipv4/ip_forward")
        self.cluster.namespace.run(forward.write_text, "1")
        self.hosts: list[RayHost] = []
        for number, each in enumerate(cpus, start=2):
            self.hosts.append(RayHost(self.cluster, number, each))
            self.hosts[-1].start()

    def close(self) -> None:
        for host in self.hosts:
            host.kill()
            host.namespace.close()
        self.cluster.close()
