"""Topologies by name: `1p1d`, `2p3d`, `4m`, `1p1d1m`. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from tasuki.bench.errors import BenchError
from tasuki.launch.config import Topology

_NAME = re.compile(r"(?:(\d+)p)?(?:(\d+)d)?(?:(\d+)m)?")
_ROLES = ("prefill", "decode", "mixed")


def parse_topology(name: str) -> Topology:
    """The topology called `name`: `2p1d` is 2 prefill and 1 decode worker, `2m` 2 mixed.

    Raises:
        BenchError: It is no such name, or one half of a split is missing.
        TopologyError: It has too many workers.
    """
    match = _NAME.fullmatch(name)
    if match is None or not name:
        raise BenchError(
            f"topology is {name!r}: write workers by role, such as 1p1d (prefill, decode), "
            "2m (mixed) or 1p1d1m"
        )
    prefill, decode, mixed = (int(count or 0) for count in match.groups())
    if not mixed and not (prefill and decode) and (prefill or decode):
        raise BenchError(
            f"topology {name!r} has {prefill} prefill, {decode} decode and no mixed workers: "
            "give it both halves, such as 1p1d, or mixed workers, such as 2m"
        )
    return Topology(prefill, decode, mixed)


def topology_name(topology: Topology) -> str:
    """The shortest name that `parse_topology` understands."""
    return "".join(
        f"{getattr(topology, role)}{role[0]}" for role in _ROLES if getattr(topology, role)
    )


def every_split(workers: int) -> list[Topology]:
    """Colocated, and every ratio of prefill to decode, that use `workers` workers.

    Raises:
        BenchError: Fewer than one.
        TopologyError: Too many.
    """
    if workers < 1:
        raise BenchError(f"workers is {workers}: use 1 or more")
    splits = [Topology(n, workers - n, 0) for n in range(1, workers)]
    return [Topology(0, 0, workers), *splits]


@dataclass(frozen=True, slots=True)
class Target:
    """A deployment to measure.

    Attributes:
        name: Of its folder and its line in plots.
        topology: The workers.
        serve: Options of `tasuki serve` besides the topology, by name, as given.
        environment: Variables of `tasuki serve`.
        kinds: What else tells it from others of its topology, such as (`spread`, `pack`).
    """

    name: str
    topology: Topology
    serve: tuple[tuple[str, Any], ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    kinds: tuple[tuple[str, str], ...] = ()

    @property
    def options(self) -> dict[str, Any]:
        """`serve`; with prefill and decode workers, roles are strict unless it says otherwise.

        So a row called `1p1d` hands every request over.
        """
        split = self.topology.prefill and self.topology.decode
        return ({"strict-roles": True} if split else {}) | dict(self.serve)

    def describe(self, machine_gpus: int) -> dict[str, Any]:
        """The block `topology` of a result file.

        Args:
            machine_gpus: GPUs of the machine, or of the Ray cluster; the deployment uses one
                per rank unless it is told to stay on the CPU.
        """
        options = self.options
        ranks = {role: int(options.get(f"tp-{role}", 1)) for role in _ROLES}
        hosts = {role: int(options.get(f"hosts-{role}", 1)) for role in _ROLES}
        counts = {role: int(getattr(self.topology, role)) for role in _ROLES}
        on_gpu = machine_gpus > 0 and options.get("device", "auto") != "cpu"
        used = sum(counts[role] * ranks[role] for role in _ROLES)
        return {
            "name": self.name,
            **dict(self.kinds),
            **counts,
            "tensor_parallel": ranks,
            **({"hosts": hosts} if max(hosts.values()) > 1 else {}),
            "workers": self.topology.workers,
            "gpus": min(used, machine_gpus) if on_gpu else 0,
        }
