"""What `tasuki serve` is told: frozen, checked when built, no I/O.

`None` in an option of a worker or of the router means that the option is not
passed on: the default stands where the setting is defined (worker/config.py,
the router's command line).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from tasuki.launch.errors import LaunchError, TopologyError
from tasuki.worker.config import MAX_RANKS, ROLES, WorkerConfig

MAX_WORKERS = 64
# How workers are spread over the nodes of a cluster, as Ray's placement groups have it.
SPREADS = ("pack", "spread", "strict-spread")
ALL_ROLES = "all"
# What the router takes for options that are words, checked before anything is started.
ROUTER_WORDS = {
    "on_kv_loss": ("recompute", "fail"),
    "policy": (
        "cost",
        "round-robin",
        "least-loaded",
        "power-of-two",
        "consistent-hash",
        "prefix-hash",
    ),
    "tool_parser": ("auto", "none", "hermes", "mistral", "llama3", "deepseek-v3"),
    "reasoning_parser": ("auto", "none", "think"),
}


@dataclass(frozen=True, slots=True)
class Topology:
    """How many workers of which role, and how they lie on the nodes of a cluster.

    Attributes:
        prefill: Workers that prefer prefill.
        decode: Workers that prefer decode.
        mixed: Workers that do both.
        spread: One of `SPREADS` for all workers together (`ALL_ROLES`), or by role; means
            nothing on one machine.
    """

    prefill: int = 1
    decode: int = 1
    mixed: int = 0
    spread: tuple[tuple[str, str], ...] = ((ALL_ROLES, "pack"),)

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
        return replace(self, spread=spread or self.spread)

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
# Of the time that a token may take: the rest is for what lies between steps.
STEP_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """Passed to every worker; names and meanings as in `tasuki.worker.config.WorkerConfig`."""

    kv_dtype: str | None = None
    load_format: str | None = None
    quantization: str | None = None
    speculate: str | None = None
    kv_memory: int | None = None
    gpu_memory_utilization: float | None = None
    max_model_len: int | None = None
    block_size: int | None = None
    max_batched_tokens: int | None = None
    max_running_requests: int | None = None
    itl_target_ms: float | None = None
    lease_s: float | None = None
    step_timeout_s: float | None = None
    pull_timeout_s: float | None = None
    kv_digest: str | None = None
    drain_s: float | None = None
    state_log_s: float | None = None
    all_reduce: str | None = None
    dispatch: str | None = None
    transport: str | None = None
    require_transport: str | None = None
    rdma_devices: str | None = None
    preflight: str | None = None
    trust_remote_code: bool = False
    fleet_cert: Path | None = None
    fleet_key: Path | None = None
    fleet_ca: Path | None = None

    def arguments(self) -> list[str]:
        """The command-line arguments that say the same."""
        return _arguments(self)

    def said(self) -> dict[str, Any]:
        """What was said, by name."""
        pairs = ((each.name, getattr(self, each.name)) for each in fields(self))
        return {name: value for name, value in pairs if value is not None}


@dataclass(frozen=True, slots=True)
class RouterOptions:
    """Passed to the router; names and meanings as in `tasuki router --help`.

    There is no load balancer that would have to notice the end of `tasuki serve`, so
    `readiness_grace_s` is 0.
    """

    on_kv_loss: str | None = None
    policy: str | None = None
    strict_roles: bool = False
    roles: str | None = None
    role_preference: float | None = None
    ttft_target_ms: float | None = None
    tpot_target_ms: float | None = None
    no_admission: bool = False
    tenant_header: str | None = None
    api_keys_file: Path | None = None
    api_key_env: str | None = None
    admin_port: int | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    fleet_cert: Path | None = None
    fleet_key: Path | None = None
    fleet_ca: Path | None = None
    metrics_listen: str | None = None
    request_log: Path | None = None
    request_log_mb: int | None = None
    request_log_files: int | None = None
    otlp_endpoint: str | None = None
    trace_sample_ratio: float | None = None
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    max_concurrent_requests: int | None = None
    max_connections: int | None = None
    idle_timeout_s: float | None = None
    body_timeout_s: float | None = None
    request_timeout_s: float | None = None
    client_stall_s: float | None = None
    readiness_grace_s: float = 0.0
    drain_s: float = 30.0

    def arguments(self) -> list[str]:
        """The command-line arguments that say the same."""
        return _arguments(self)

    @property
    def key_variable(self) -> str | None:
        """Environment variable in which a client has its API key; None: it requires none."""
        required = self.api_keys_file is not None or self.api_key_env is not None
        return (self.api_key_env or "TASUKI_API_KEY") if required else None


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """Everything that `tasuki serve` decides from.

    Attributes:
        model: Alias, folder or hub id.
        topology: The workers.
        tensor_parallel: Ranks of one worker, by role.
        host: Address the router binds.
        port: Of the router; None: 8000 if free, else any free one.
        served_names: What requests may call the model; empty: derived from `model`.
        device: `auto` (the GPUs, if there are any), `cpu`, `cuda`, or `cuda:N` (from
            the N-th GPU on).
        dtype: `auto`, `float32` or `bfloat16`, the same for all workers.
        worker_host: Address the workers bind and tell each other.
        worker_base_port: First worker's port, counting up; None: free ones.
        worker: Options of every worker.
        role_options: By role, what its workers get in place of these, see `role_options.py`.
        router: Options of the router.
        log_dir: Keeps all logs there; None: a folder that is removed after a clean end.
        echo_logs: Show the processes' output, prefixed, on stderr.
        startup_timeout_s: Until every worker is ready.
        on: Where workers run: `local`, `ray` or `ray://HOST:PORT`.
        worker_cpus: CPUs that Ray sets aside for each worker; None: one for each rank.
        control_socket: Where `tasuki scale` reaches the launcher; None: see `control.py`.
    """

    model: str
    topology: Topology = field(default_factory=Topology)
    tensor_parallel: tuple[tuple[str, int], ...] = ()
    host: str = "127.0.0.1"
    port: int | None = None
    served_names: tuple[str, ...] = ()
    device: str = "auto"
    dtype: str = "auto"
    worker_host: str = "127.0.0.1"
    worker_base_port: int | None = None
    worker: WorkerOptions = field(default_factory=WorkerOptions)
    role_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    router: RouterOptions = field(default_factory=RouterOptions)
    log_dir: Path | None = None
    echo_logs: bool = True
    startup_timeout_s: float = 600.0
    on: str = LOCAL
    worker_cpus: int | None = None
    control_socket: Path | None = None

    def worker_options(self, role: str) -> WorkerOptions:
        """Of the workers of a role. Unless it is said, steps follow from the time per token.

        They drain as long as the router does.
        """
        options = replace(self.worker, drain_s=self.router.drain_s)
        if options.itl_target_ms is None and self.router.tpot_target_ms is not None:
            options = replace(options, itl_target_ms=STEP_SHARE * self.router.tpot_target_ms)
        return replace(options, **self.role_options.get(role, {}))

    @property
    def ranks(self) -> tuple[int, ...]:
        """Of each worker, in the order of `Topology.members`."""
        return tuple(self.ranks_of(role) for _, role in self.topology.members())

    def ranks_of(self, role: str) -> int:
        """Of each worker of a role."""
        return dict(self.tensor_parallel).get(role, 1)

    def __post_init__(self) -> None:
        for role, ranks in self.tensor_parallel:
            if not 1 <= ranks <= MAX_RANKS:
                raise TopologyError(f"--tp-{role} is {ranks}: use a value from 1 to {MAX_RANKS}")
        # Refuses now what every worker would refuse after it was started.
        for role in ROLES:
            said = self.worker_options(role).said()
            WorkerConfig(model=Path(self.model), device=self.device, dtype=self.dtype, **said)
            if role in self.role_options and not getattr(self.topology, role):
                raise LaunchError(
                    f"--{role}-option is given, and there is no {role} worker: give --{role} too"
                )
        if (self.router.tls_cert is None) != (self.router.tls_key is None):
            raise LaunchError("--tls-cert and --tls-key go together: give both, or none")
        endpoint = self.router.otlp_endpoint
        if endpoint is not None and not endpoint.startswith("http://"):
            raise LaunchError(f"--otlp-endpoint is {endpoint!r}: use http://HOST:PORT")
        if endpoint is None and self.router.trace_sample_ratio is not None:
            raise LaunchError("--trace-sample-ratio is given without --otlp-endpoint: give both")
        log = self.router.request_log
        if log is None and (self.router.request_log_mb or self.router.request_log_files):
            raise LaunchError(
                "--request-log-mb or -files is given without --request-log: give both"
            )
        for name, words in ROUTER_WORDS.items():
            said = getattr(self.router, name)
            if said not in (None, *words):
                flag = f"--{name.replace('_', '-')}"
                raise LaunchError(f"{flag} is {said!r}: use one of {', '.join(words)}")
        self._check_place()
        last_worker = self.topology.workers - 1
        for flag, port, more in (
            ("--port", self.port, 0),
            ("--worker-base-port", self.worker_base_port, last_worker),
        ):
            if port is not None and not 0 <= port <= 65_535 - more:
                raise LaunchError(f"{flag} is {port}: use a value from 0 to {65_535 - more}")

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
        if self.worker_cpus is not None or self.topology.spread != Topology().spread:
            raise LaunchError("--spread and --worker-cpus divide a Ray cluster: give --on ray too")


def _arguments(options: WorkerOptions | RouterOptions) -> list[str]:
    words: list[str] = []
    for each in fields(options):
        value = getattr(options, each.name)
        flag = "--" + each.name.replace("_", "-")
        if value is True:
            words.append(flag)
        elif value is not None and value is not False:
            words += [flag, f"{value:g}" if isinstance(value, float) else str(value)]
    return words
