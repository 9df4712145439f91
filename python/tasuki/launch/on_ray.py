"""Workers in actors of a Ray cluster; the router runs beside this launcher, the driver.

Ray finds the places: each worker is a bundle of a placement group, or one on each of its hosts.
One that dies is started again in its bundles, which Ray moves to another node if theirs is gone.
Ray restarts no actor (`max_restarts=0`): the supervisor does, as on one machine. All ends with
the driver.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tasuki.launch import topology
from tasuki.launch.config import ServeConfig
from tasuki.launch.engine import Member, Wait
from tasuki.launch.errors import LaunchError
from tasuki.launch.forking import Process, spawn
from tasuki.launch.placement import (
    STRATEGIES,
    Bundle,
    Group,
    Node,
    is_too_much,
    make_groups,
    no_room,
    passed_on,
    without,
)
from tasuki.launch.ray_child import CALLS_AT_ONCE, RayChild
from tasuki.launch.ray_process import Place, RayProcess
from tasuki.launch.settle import settle_dtype
from tasuki.launch.supervisor import say
from tasuki.launch.topology import ProcessSpec
from tasuki.worker.config import KEY_VARIABLE

_REACH_S = 10.0
_LOOK_EVERY_S = 0.2
_TELL_EVERY_S = 10.0
_NODE_ID = "ray.io/node-id"  # a label that every node has


class RayEngine:
    """`Engine` of a Ray cluster. Joins it as a driver, in a job of its own."""

    def __init__(self, config: ServeConfig) -> None:
        """Join the cluster.

        Raises:
            LaunchError: There is none at that address.
        """
        self._config = config
        self._places: dict[str, Place] = {}
        self._freed: list[Place] = []  # of workers that have ended, in groups that others use
        # The hosts of a worker prove with it that they belong together.
        self._nodes_key = os.environ.get(KEY_VARIABLE) or secrets.token_hex(32)
        self._interrupted = False
        _join(config.on)
        self._on_gpus = _is_on_gpus(config.worker.device)
        nodes = ", ".join(node.address for node in _nodes())
        say(f"Ray cluster of {len(_nodes())} nodes: {nodes}")

    def settle_dtype(self, model: Path) -> str:
        """See `Engine`; on CPUs it is measured on this machine."""
        if self._on_gpus and self._config.worker.dtype == "auto":
            return "bfloat16"
        environment = {"OMP_NUM_THREADS": str(self._config.worker_cpus or 1)}
        dtype, reason = settle_dtype(
            model,
            self._config.worker.dtype,
            environment,
            on_measure=lambda: say("measuring dtypes on this machine …"),
        )
        say(f"dtype {reason}")
        return dtype

    def place(
        self, model: Path, dtype: str, members: Sequence[Member] | None, wait: Wait
    ) -> tuple[ProcessSpec, ...]:
        """See `Engine`."""
        config = self._config
        workers = list(config.topology.members()) if members is None else list(members)
        self._places |= self._find_places(make_groups(config, workers, self._on_gpus), wait)
        specs = []
        for index, member in enumerate(workers):
            port = config.worker_port(index) if members is None else 0
            settled = {"dtype": dtype, "device": "cuda" if self._on_gpus else "cpu"}
            words = topology.worker_words(config, self._model_name(model), member, settled, port)
            bundle = self._places[member[0]].bundle
            machine = topology.Machine(cores=bundle.cpus, free_bytes=0)
            hosts = config.hosts_of(member[1])
            ranks = config.ranks_of(member[1]) // hosts
            threads = topology.threads_per_rank(machine.cores, ranks)
            environment = topology.worker_environment(config, machine)
            assigned = {"OMP_NUM_THREADS": str(threads), **passed_on(os.environ)}
            if hosts > 1:
                assigned[KEY_VARIABLE] = self._nodes_key
            specs.append(
                ProcessSpec(
                    member[0],
                    tuple(words),
                    tuple(environment.items()),
                    "ready ",
                    assigned=tuple(assigned.items()),
                    may_move=True,
                )
            )
        return tuple(specs)

    def start(self, spec: ProcessSpec, output: int) -> Process:
        """See `Engine`."""
        place = self._places.get(spec.name)
        if place is None:
            return spawn(spec, output)
        if self._interrupted:
            raise OSError("the launcher ends")
        actors = [
            ray.remote(RayChild)
            .options(
                num_cpus=place.bundle.cpus,
                num_gpus=place.bundle.gpus,
                max_restarts=0,
                max_concurrency=CALLS_AT_ONCE,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    place.group, placement_group_bundle_index=index
                ),
            )
            .remote()
            for index in place.indices
        ]
        return RayProcess(spec, actors, os.dup(output), lambda: self._describe(place))

    def release(self, names: Collection[str]) -> None:
        """See `Engine`."""
        for name in names:
            if (place := self._places.pop(name, None)) is not None:
                self._freed.append(place)
        used = {place.group.id for place in self._places.values()}
        unused = {p.group.id: p.group for p in self._freed if p.group.id not in used}
        self._freed = [place for place in self._freed if place.group.id in used]
        for group in unused.values():  # a placement group is given back whole
            remove_placement_group(group)

    def interrupt(self) -> None:
        """See `Engine`."""
        self._interrupted = True

    def close(self) -> None:
        """See `Engine`."""
        ray.shutdown()

    def _model_name(self, model: Path) -> str:
        """How workers name the model: a folder must be there on every node, the rest they fetch."""
        is_folder = Path(self._config.model).expanduser().exists()
        return str(model) if is_folder else self._config.model

    def _describe(self, place: Place) -> str:
        """Where the start of a worker's actors stands."""
        if placement_group_table(place.group)["state"] == "CREATED":
            return "its Ray actor starts"
        return f"it waits for a place: {no_room([place.asked], _nodes())}"

    def _find_places(self, groups: Sequence[Group], wait: Wait) -> dict[str, Place]:
        """Places for groups of workers: freed ones first, since Ray keeps them for this deployment.

        Raises:
            LaunchError: There is no room; the freed places stay so then.
        """
        reused: dict[str, Place] = {}
        freed = list(self._freed)
        for group in groups:
            for bundle, hosts in Counter(group.bundles).items():
                found = next((p for p in freed if self._suits(p, group, bundle, hosts)), None)
                if found is not None:
                    freed.remove(found)
                    reused[bundle.name] = replace(found, bundle=bundle)
        rest = [without(group, reused) for group in groups]
        reserved = self._reserve([group for group in rest if group.bundles], wait)
        self._freed = freed
        return reused | reserved

    def _suits(self, place: Place, group: Group, bundle: Bundle, hosts: int) -> bool:
        """Whether a worker may have a freed place: an equal one, spread with the same workers."""
        former, role = (name.rpartition("-")[0] for name in (place.bundle.name, bundle.name))
        spread_of = self._config.topology.spread_of
        return (
            spread_of(former) == spread_of(role)
            and place.spread == group.spread
            and place.bundle.resources() == bundle.resources()
            and len(place.indices) == hosts
        )

    def _reserve(self, groups: Sequence[Group], wait: Wait) -> dict[str, Place]:
        """Places for groups of workers. Nothing is held after an exception, one of `wait` included.

        Raises:
            LaunchError: There is no room.
        """
        held: list[PlacementGroup] = []
        places: dict[str, Place] = {}
        try:
            for group in groups:
                made = placement_group(
                    [bundle.resources() for bundle in group.bundles],
                    strategy=STRATEGIES[group.spread],
                    bundle_label_selector=self._selectors(group),
                )
                held.append(made)
                for index, bundle in enumerate(group.bundles):
                    earlier = places[bundle.name].indices if bundle.name in places else ()
                    indices = (*earlier, index)
                    places[bundle.name] = Place(made, indices, bundle, group.spread)
            self._await(held, groups, wait)
        except BaseException:
            for made in held:
                remove_placement_group(made)
            raise
        return places

    def _selectors(self, group: Group) -> list[dict[str, str]] | None:
        """Nodes that bundles may have: not those of earlier workers that want a node each."""
        if group.spread != "strict-spread" or not self._places:
            return None
        nodes: set[str] = set()
        for place in self._places.values():
            if place.spread == group.spread:
                nodes.update(placement_group_table(place.group)["bundles_to_node_id"].values())
        return [{_NODE_ID: f"!in({','.join(sorted(nodes))})"} for _ in group.bundles]

    def _await(self, made: Sequence[PlacementGroup], groups: Sequence[Group], wait: Wait) -> None:
        begun_s = told_s = time.monotonic()
        held = [place.asked for place in (*self._places.values(), *self._freed)]
        deployment = [*held, *groups]
        while waiting := [g for g in made if not g.wait(0)]:
            states = [placement_group_table(group) for group in waiting]
            nodes = _nodes()
            found = [s.get("stats", {}).get("scheduling_state") == "INFEASIBLE" for s in states]
            if any(found) or is_too_much(deployment, nodes):
                raise LaunchError(no_room(groups, nodes, len(self._places)))
            now_s = time.monotonic()
            if now_s - begun_s > self._config.startup_timeout_s:
                asked = no_room(groups, nodes, len(self._places))
                raise LaunchError(f"others have what this deployment asks for; {asked}")
            if now_s - told_s > _TELL_EVERY_S:
                told_s = now_s
                say("waiting until others give back what this deployment asks of the Ray cluster")
            wait(_LOOK_EVERY_S)


def count_gpus(on: str) -> int:
    """GPUs of a cluster, which is left again.

    Raises:
        LaunchError: There is none at that address.
    """
    _join(on)
    try:
        return int(sum(node.gpus for node in _nodes()))
    finally:
        ray.shutdown()


def _join(on: str) -> None:
    address = on.partition("://")[2]
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if port.isdecimal():
        _reach(address, host, int(port))
    # Else Ray puts the machine's own address in place of a loopback one, and waits for it.
    own = {"_node_ip_address": host} if host.startswith("127.") or host == "::1" else {}
    try:
        ray.init(
            address=address or "auto",
            namespace="tasuki",
            log_to_driver=False,
            logging_level="warning",
            **own,
        )
    except (RayError, ConnectionError, RuntimeError, ValueError, OSError) as error:
        at = f"ray://{address}" if address else "RAY_ADDRESS or on this machine"
        raise LaunchError(
            f"no Ray cluster can be joined ({at}): {' '.join(str(error).split())}; this machine"
            " must be one of its nodes: ray start --head, or ray start --address HOST:PORT"
        ) from error


def _reach(address: str, host: str, port: int) -> None:
    """Refuse at once what nobody listens at: Ray asks there for minutes.

    Raises:
        LaunchError: No connection within `_REACH_S`.
    """
    try:
        socket.create_connection((host, port), _REACH_S).close()
    except (OSError, OverflowError) as error:
        raise LaunchError(
            f"no Ray cluster can be joined (ray://{address}): no connection within {_REACH_S:g} s"
            f" ({error}); give ray://HOST:PORT as `ray start --head` printed them, on a machine"
            " that is one of its nodes"
        ) from error


def _nodes() -> list[Node]:
    alive: Iterable[dict[str, Any]] = (node for node in ray.nodes() if node["Alive"])
    return [
        Node(
            node["NodeManagerAddress"],
            node["Resources"].get("CPU", 0.0),
            node["Resources"].get("GPU", 0.0),
        )
        for node in alive
    ]


def _is_on_gpus(device: str) -> bool:
    """Whether workers told `device` run on GPUs of the cluster.

    Raises:
        LaunchError: They are told to, and it has none.
    """
    there_are = any(node.gpus for node in _nodes())
    if ":" in device:
        raise LaunchError(f"--device is {device}: Ray chooses the GPUs, use cuda, cpu or auto")
    if device == "cuda" and not there_are:
        raise LaunchError("--device is cuda, and no node of the Ray cluster has GPUs: use cpu")
    return there_are and device != "cpu"
