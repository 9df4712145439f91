"""From settings to processes: pure, no I/O, nothing is started here."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tasuki.launch.config import ServeConfig
from tasuki.launch.errors import LaunchError
from tasuki.launch.gpus import VISIBLE, assign_gpus, is_on_gpus
from tasuki.options import arguments

# What a worker imports before it is told anything; most of its start is the import of torch.
PRELOAD = ("tasuki.cli", "pydantic.type_adapter", "tasuki.kv.nixl", "tasuki.worker.main")
_PRELOAD_ON_GPUS = (*PRELOAD, "tasuki.models.ops_cuda")  # Triton, which a CPU does not need
_MANY_WORKERS = 4  # up to here the worker's own default share of memory adds up to less than half


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process to run.

    Attributes:
        name: Unique; prefixes its log lines.
        arguments: Of the program; `--port` is among them.
        environment: Added to the launcher's own, which wins where it says the same.
        assigned: Added too; wins over everything (what is divided among workers).
        ready_prefix: Start of the stdout line that says it is ready; an address follows.
        program: What the arguments are for.
        preload: Modules that a fork server may import for it, see `forking`.
        may_move: Whether it may come back at another port than it has had.
    """

    name: str
    arguments: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]
    ready_prefix: str
    program: tuple[str, ...] = (sys.executable, "-m", "tasuki")
    assigned: tuple[tuple[str, str], ...] = ()
    preload: tuple[str, ...] = ()
    may_move: bool = False


@dataclass(frozen=True, slots=True)
class Machine:
    """What the launcher found out about the machine.

    Attributes:
        cores: CPU cores that may be used.
        free_bytes: Memory that can still be taken.
        gpus: GPUs that may be used, as `CUDA_VISIBLE_DEVICES` names them.
        peer_access: Whether these GPUs can read one another.
    """

    cores: float
    free_bytes: int
    gpus: tuple[str, ...] = ()
    peer_access: bool = True


def threads_per_rank(cores: float, ranks: int) -> int:
    """Compute threads for each of `ranks` busy processes on `cores` cores, at least 1.

    More threads than cores make OpenMP's barriers wait for threads that do not
    run: two workers on two cores get ten times slower.
    """
    return max(1, int(cores // max(1, ranks)))


def worker_environment(config: ServeConfig, machine: Machine) -> dict[str, str]:
    """Variables for every worker: threads that do not spin, none of NumPy's own."""
    return {
        "OMP_NUM_THREADS": str(threads_per_rank(machine.cores, sum(config.ranks))),
        "OMP_WAIT_POLICY": "passive",
        "OPENBLAS_NUM_THREADS": "1",
        "GOMP_SPINCOUNT": "0",
        "KMP_BLOCKTIME": "0",
    }


def worker_words(
    config: ServeConfig,
    model: str,
    member: tuple[str, str],
    settled: Mapping[str, Any],
    port: int = 0,
) -> list[str]:
    """The arguments of a worker.

    Args:
        config: The settings.
        model: As the worker finds it.
        member: Name and role.
        settled: What the launcher decides for the worker: fields of `WorkerConfig`.
        port: 0 lets it choose.
    """
    name, role = member
    worker = replace(
        config.worker_of(role),
        name=name,
        role=role,
        served_name=served_names(config, Path(model))[0],
        tensor_parallel=config.ranks_of(role),
        **settled,
    )
    place = ["--host", config.worker_host, "--port", str(port)]
    return ["worker", "--model", model, *place, *arguments(worker)]


def worker_specs(
    config: ServeConfig,
    model: Path,
    dtype: str,
    machine: Machine,
    members: Sequence[tuple[str, str]] | None = None,
    taken: Collection[str] = (),
) -> tuple[ProcessSpec, ...]:
    """The workers' processes on one machine, in the order of their names.

    Args:
        config: The settings.
        model: The model's local folder.
        dtype: Settled for all workers.
        machine: Divided among the workers.
        members: Workers that join those that run, with ports of their own; None: all of the
            topology.
        taken: GPUs of those that run.

    Raises:
        LaunchError: The pools that were asked for do not fit beside one another, or
            there are fewer GPUs than workers.
    """
    environment = tuple(worker_environment(config, machine).items())
    on_gpus = is_on_gpus(config.worker.device, machine.gpus)
    gpus = assign_gpus(config, machine.gpus, members, taken) if on_gpus else []
    workers = list(config.topology.members()) if members is None else members
    settled: dict[str, Any] = {"dtype": dtype, "device": "cuda" if on_gpus else "cpu"}
    if not on_gpus:  # else each has a GPU's memory to itself
        settled["kv_memory"] = _kv_memory(config, machine, len(workers))
    if stages_in_host(config, machine):
        settled["transport"] = "host-staged"
    specs = []
    for index, member in enumerate(workers):
        port = config.worker_port(index) if members is None else 0
        words = worker_words(config, str(model), member, settled, port)
        assigned = ((VISIBLE, ",".join(gpus[index])),) if on_gpus else ()
        specs.append(
            ProcessSpec(
                member[0],
                tuple(words),
                environment,
                "ready ",
                assigned=assigned,
                preload=preload(on_gpus),
                may_move=True,
            )
        )
    return tuple(specs)


def preload(on_gpus: bool) -> tuple[str, ...]:
    """Modules that all workers import, see `ProcessSpec.preload`."""
    return _PRELOAD_ON_GPUS if on_gpus else PRELOAD


def stages_in_host(config: ServeConfig, machine: Machine) -> bool:
    """Whether handoffs go through host memory because GPUs cannot read one another."""
    return (
        is_on_gpus(config.worker.device, machine.gpus)
        and config.topology.workers > 1
        and config.worker.transport is None
        and not machine.peer_access
    )


def _kv_memory(config: ServeConfig, machine: Machine, workers: int) -> int | None:
    """Bytes of a pool that keep all pools within the free memory; None: the worker's default."""
    free_bytes = machine.free_bytes
    each_bytes = config.worker.kv_memory
    if each_bytes is None:
        many = workers > _MANY_WORKERS
        return free_bytes // (2 * workers) if many else None
    if each_bytes * workers > free_bytes:
        raise LaunchError(
            f"--kv-memory is {each_bytes} bytes for each of {workers} workers, "
            f"{free_bytes} are free on this machine: use less than {free_bytes // workers}"
        )
    return each_bytes


def router_spec(config: ServeConfig, model: Path, workers: Path, port: int) -> ProcessSpec:
    """The router's process.

    Args:
        config: The settings.
        model: The model's local folder (tokenizer, chat template).
        workers: The file of the workers' addresses, which the router watches.
        port: 0 lets it choose.
    """
    words = ["router", "--host", config.host, "--port", str(port), "--model", str(model)]
    for name in served_names(config, model):
        words += ["--served-model-name", name]
    words += ["--discover", f"file:{workers}", *config.router.arguments()]
    words += arguments(config.worker, only=("fleet_cert", "fleet_key", "fleet_ca"))
    return ProcessSpec("router", tuple(words), (), "listening on ")


def served_names(config: ServeConfig, model: Path) -> tuple[str, ...]:
    """What requests may call the model; the first is the one that answers carry."""
    if config.served_names:
        return config.served_names
    asked = config.model.partition("@")[0]
    is_path = asked.startswith(("/", ".", "~"))
    names = [model.name, asked] if is_path or "/" not in asked else [asked]
    return tuple(dict.fromkeys(n for n in names if n and not n.startswith((".", "~", "/"))))


def with_port(spec: ProcessSpec, address: str) -> ProcessSpec:
    """`spec` bound to the port of `address`, so that a restart keeps the address."""
    words = list(spec.arguments)
    words[words.index("--port") + 1] = address.rpartition(":")[2].rstrip("/")
    return replace(spec, arguments=tuple(words))


def merged_environment(own: Mapping[str, str], spec: ProcessSpec) -> dict[str, str]:
    """The child's environment: what the user has set wins over what Tasuki would set.

    Not over what it was assigned, which is a share of what the user has set.
    """
    return {**dict(spec.environment), **own, **dict(spec.assigned)}
