"""What `tasuki serve` is told: frozen, checked when built, no I/O."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tasuki.launch.errors import LaunchError, TopologyError
from tasuki.launch.router_options import RouterOptions
from tasuki.worker.config import MAX_RANKS, ROLES, WorkerConfig

MAX_WORKERS = 64
MAX_PORT = 65_535
# How workers are spread over the nodes of a cluster, as Ray's placement groups have it.
SPREADS = ("pack", "spread", "strict-spread")
ALL_ROLES = "all"


@dataclass(frozen=True, slots=True)
class Topology:
    """How many workers of which role, and how they lie on the nodes of a cluster.

    Attributes:
        prefill: Workers that prefer prefill.
        decode: Workers that prefer decode.
        mixed: Workers that do both.
        spread: One of `SPREADS` for all workers together (`ALL_ROLES`), or by role; for a Ray
            cluster.
    """

    prefill: int = 1
    decode: int = 1
    mixed: int = 0
    spread: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        for role, how in self.spread:
            if how not in SPREADS or role not in (ALL_ROLES, *ROLES):
                said = how if role == ALL_ROLES else f"{role}={how}"
                raise TopologyError(
                    f"--spread is {said!r}: use one of {', '.join(SPREADS)}, or by role, such as"
                    " decode=spread"
                )
        for role in ROLES:
            if getattr(self, role) < 0:
                raise TopologyError(f"--{role} is {getattr(self, role)}: use 0 or more")
        if not 1 <= self.workers <= MAX_WORKERS:
            raise TopologyError(
                f"the topology has {self.workers} workers: use 1 to {MAX_WORKERS} in all "
                "(--prefill, --decode, --mixed)"
            )

    @classmethod
    def of(cls, prefill: int | None, decode: int | None, mixed: int | None) -> Topology:
        """Fill in what was not said; spread as by default.

        Nothing said means 1 prefill + 1 decode. One half of a split said means
        one worker for the other half, unless there are mixed workers to do it.
        """
        other = 0 if mixed else 1
        return cls(
            prefill=other if prefill is None else prefill,
            decode=other if decode is None else decode,
            mixed=mixed or 0,
        )

    def spread_as(self, texts: Iterable[str]) -> Topology:
        """The same with another spread: of words such as `spread` and `decode=strict-spread`.

        Raises:
            TopologyError: One is no such word, or a role's is given twice.
        """
        pairs = [text.rpartition("=") for text in texts]
        spread = tuple((role if equals else ALL_ROLES, how) for role, equals, how in pairs)
        if len(dict(spread)) < len(spread):
            raise TopologyError(f"--spread is given twice for one role: {spread}; keep one")
        return replace(self, spread=spread)

    @property
    def workers(self) -> int:
        """Workers of all roles."""
        return self.prefill + self.decode + self.mixed

    def members(self) -> Iterator[tuple[str, str]]:
        """Each worker's (name, role), in the order of their numbering: `prefill-0` first."""
        for role in ROLES:
            for index in range(getattr(self, role)):
                yield f"{role}-{index}", role

    def spread_of(self, role: str) -> tuple[str, str]:
        """The group that workers of a role are spread with, a role or `ALL_ROLES`, and how."""
        spread = {ALL_ROLES: "pack", **dict(self.spread)}
        group = role if role in spread else ALL_ROLES
        return group, spread[group]

    def with_count(self, role: str, count: int) -> Topology:
        """The same with `count` workers of a role.

        Raises:
            TopologyError: The role does not exist, or there would be too few or too many.
        """
        if role not in ROLES:
            raise TopologyError(f"{role!r} is no role: use one of {', '.join(ROLES)}")
        if count < 1:
            raise TopologyError(f"{role} {count}: use 1 or more workers")
        return replace(self, **{role: count})  # type: ignore[arg-type]

    def __str__(self) -> str:
        return " + ".join(f"{getattr(self, r)} {r}" for r in ROLES if getattr(self, r))


LOCAL = "local"


def step_target_ms(worker: WorkerConfig, router: RouterOptions) -> float | None:
    """--itl-target-ms, which follows from --tpot-target-ms if it is not given; None: neither is."""
    if worker.itl_target_ms is None and router.tpot_target_ms is not None:
        from tasuki._native import STEP_SHARE  # which need not be built to fetch a model

        return STEP_SHARE * router.tpot_target_ms
    return worker.itl_target_ms


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """Everything that `tasuki serve` decides from.

    Attributes:
        model: Alias, folder or hub id.
        topology: The workers.
        tensor_parallel: Ranks of one worker, by role.
        hosts: Nodes of a Ray cluster that divide the ranks of one worker, by role.
        host: Address the router binds.
        port: Of the router; None: 8000 if free, else any free one.
        served_names: What requests may call the model; empty: derived from `model`.
        worker_host: Address the workers bind and tell each other.
        worker_base_port: First worker's port, counting up; None or 0: free ones.
        worker: Settings of every worker, as far as all workers have the same. With device
            `cuda:N` the workers have the GPUs from the N-th on.
        role_options: By role, what its workers get in place of these, see `role_options.py`.
        router: Options of the router.
        log_dir: Keeps all logs there; None: a folder that is removed after a clean end.
        echo_logs: Show the processes' output, prefixed, on stderr.
        startup_timeout_s: Until every worker is ready.
        on: Where workers run: `local`, `ray` or `ray://HOST:PORT`.
        worker_cpus: CPUs that Ray sets aside for each worker, on each of its nodes; None: one
            for each rank.
        control_socket: Where `tasuki scale` reaches the launcher; None: see `control.py`.
    """

    model: str
    topology: Topology = field(default_factory=Topology)
    tensor_parallel: tuple[tuple[str, int], ...] = ()
    hosts: tuple[tuple[str, int], ...] = ()
    host: str = "127.0.0.1"
    port: int | None = None
    served_names: tuple[str, ...] = ()
    worker_host: str = "127.0.0.1"
    worker_base_port: int | None = None
    worker: WorkerConfig = field(default_factory=WorkerConfig)
    role_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    router: RouterOptions = field(default_factory=RouterOptions)
    log_dir: Path | None = None
    echo_logs: bool = True
    startup_timeout_s: float = 600.0
    on: str = LOCAL
    worker_cpus: int | None = None
    control_socket: Path | None = None

    def worker_of(self, role: str) -> WorkerConfig:
        """Settings of the workers of a role, which drain as long as the router does.

        Raises:
            ConfigError: A value is out of its range.
        """
        options = replace(
            self.worker,
            drain_s=self.router.drain_s,
            itl_target_ms=step_target_ms(self.worker, self.router),
        )
        return replace(options, **self.role_options.get(role, {}))

    @property
    def ranks(self) -> tuple[int, ...]:
        """Of each worker, in the order of `Topology.members`."""
        return tuple(self.ranks_of(role) for _, role in self.topology.members())

    def ranks_of(self, role: str) -> int:
        """Of each worker of a role."""
        return dict(self.tensor_parallel).get(role, 1)

    def worker_port(self, index: int) -> int:
        """Port of the worker with this index in the topology; 0 lets it choose a free one."""
        return self.worker_base_port + index if self.worker_base_port else 0

    def hosts_of(self, role: str) -> int:
        """Nodes that divide each worker of a role."""
        return dict(self.hosts).get(role, 1)

    def __post_init__(self) -> None:
        for name in ("model", "host", "worker_host"):
            if not getattr(self, name):
                flag = name.replace("_", "-")
                raise LaunchError(f"--{flag} is '': give a value, or leave the option out")
        for role, ranks in self.tensor_parallel:
            if not 1 <= ranks <= MAX_RANKS:
                raise TopologyError(f"--tp-{role} is {ranks}: use a value from 1 to {MAX_RANKS}")
        for role in ROLES:
            self.worker_of(role)  # refuses now what its workers would refuse later
            if role in self.role_options and not getattr(self.topology, role):
                raise LaunchError(
                    f"--{role}-option is given, and there is no {role} worker: give --{role} too"
                )
        if len(set(self.served_names)) < len(self.served_names) or "" in self.served_names:
            raise LaunchError(
                f"--served-model-name is {', '.join(map(repr, self.served_names))}: give each name"
                " once, and none that is empty"
            )
        self._check_strict_roles()
        self._check_hosts()
        self._check_place()
        self._check_ports()

    def _check_ports(self) -> None:
        if self.port is not None and not 0 <= self.port <= MAX_PORT:
            raise LaunchError(f"--port is {self.port}: use a value from 0 to {MAX_PORT}")
        base, workers = self.worker_base_port, self.topology.workers
        last = MAX_PORT - (workers - 1)
        if base is not None and not 0 <= base <= last:
            raise LaunchError(
                f"--worker-base-port is {base}, {workers} workers count up from it: use a value"
                f" from 1 to {last}, or 0 for free ports"
            )

    def _check_strict_roles(self) -> None:
        workers = self.topology
        if not self.router.strict_roles or self.router.roles == "follow" or workers.mixed:
            return
        for role in ("prefill", "decode"):
            if not getattr(workers, role):
                raise TopologyError(
                    f"roles are strict, and the topology ({workers}) has no {role} worker: give"
                    f" --{role} or --mixed"
                )

    def _check_hosts(self) -> None:
        for role, count in self.hosts:
            ranks = self.ranks_of(role)
            if count < 1 or ranks % count:
                raise TopologyError(
                    f"--hosts-{role} is {count}, --tp-{role} is {ranks}: use a number of hosts that"
                    " divides the ranks"
                )
            if count > 1 and self.worker.all_reduce == "symmetric":
                raise TopologyError(
                    f"--hosts-{role} is {count}, --all-reduce is symmetric, which one host has:"
                    " use nccl"
                )

    def _check_place(self) -> None:
        where, _, address = self.on.partition("://")
        if where == "ray":
            if address and not re.fullmatch(r"(\[[0-9a-fA-F:]+\]|[^:/\s]+):\d+", address):
                raise LaunchError(f"--on is {self.on!r}: use ray, or ray://HOST:PORT")
            if self.worker_host != "127.0.0.1":
                raise LaunchError(
                    f"--worker-host is {self.worker_host} with --on {self.on}: leave it out,"
                    " each worker binds the address of its Ray node"
                )
            return
        if self.on != LOCAL:
            raise LaunchError(f"--on is {self.on!r}: use local, ray or ray://HOST:PORT")
        is_divided = any(count > 1 for _, count in self.hosts)
        if self.worker_cpus is not None or self.topology.spread or is_divided:
            raise LaunchError(
                "--spread, --hosts-* and --worker-cpus divide a Ray cluster: give --on ray too"
            )
