"""What the launcher asks the operating system."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from tasuki.launch.config import LOCAL, Topology
from tasuki.launch.gpus import (
    default_topology,
    describe_gpus,
    from_device,
    read_one_another,
    usable_gpus,
)
from tasuki.launch.planned import Planned, plan_gpus
from tasuki.launch.router_options import RouterOptions
from tasuki.launch.supervisor import say
from tasuki.launch.topology import Machine
from tasuki.models.fetch import resolve_model
from tasuki.processor import usable_cores
from tasuki.worker.config import WorkerConfig, check_device
from tasuki.worker.memory import available_bytes

PREFERRED_PORT = 8000


def look_at_machine() -> Machine:
    """Cores, memory and GPUs that this process may use."""
    gpus = usable_gpus()
    return Machine(
        cores=usable_cores(),
        free_bytes=available_bytes(),
        gpus=gpus,
        peer_access=len(gpus) < 2 or read_one_another(),
    )


def choose_topology(
    prefill: int | None,
    decode: int | None,
    mixed: int | None,
    device: str = "auto",
    ranks: Mapping[str, int] | None = None,
    on: str = LOCAL,
) -> Topology:
    """The workers that were asked for; where no role was, those that suit the machine.

    Args:
        prefill, decode, mixed: Workers of each role; None: not given.
        device: As in `ServeConfig`.
        ranks: Of one worker, by role.
        on: As in `ServeConfig`; elsewhere than on this machine, its GPUs do not count.

    Raises:
        TasukiError: The device or the numbers are refused.
    """
    if on != LOCAL or not (prefill is decode is mixed is None):
        return Topology.of(prefill, decode, mixed)
    check_device(device)
    topology, reason = default_topology(device, ranks or {}, usable_gpus())
    if reason:
        say(reason)
    return topology


def plan_topology(
    model: str, worker: WorkerConfig, router: RouterOptions, explain: bool
) -> Planned | None:
    """The workers that suit the GPUs of this machine.

    Says what was chosen and why.

    Args:
        model: Alias, folder or hub id; fetched if need be.
        worker: Settings of all workers: the device, and how long steps may take.
        router: What the plan is made for.
        explain: Show the whole plan.

    Returns:
        None where there are no two GPUs to divide, or no plan: `choose_topology` says what then.

    Raises:
        TasukiError: The device is refused, or the model cannot be had.
    """
    check_device(worker.device)
    gpus = () if worker.device == "cpu" else from_device(worker.device, describe_gpus())
    if len(gpus) < 2:
        if explain:
            say(f"nothing to plan: {len(gpus)} GPUs")
        return None
    planned = plan_gpus(gpus, resolve_model(model), worker, router, read_one_another())
    if explain and planned.table:
        print(planned.table, file=sys.stderr)
    say(planned.line)
    return None if planned.topology is None else planned


@contextmanager
def router_port(host: str, wanted: int | None) -> Iterator[int]:
    """The router's port: the one wanted, else 8000 if it is free, else 0 (any free one).

    For the length of the block no other launcher of this machine gets 8000: the router binds it
    some time later.
    """
    if wanted is not None:
        yield wanted
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(socket.AF_UNIX) as claim:
        try:
            claim.bind(f"\0tasuki-router-{PREFERRED_PORT}")  # of this network namespace (Linux)
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host, PREFERRED_PORT))
            port = PREFERRED_PORT
        except OSError:
            port = 0
        yield port
