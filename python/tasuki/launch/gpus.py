"""Which GPUs there are, and which worker gets which.

The launcher loads no torch: it asks the driver. A worker sees only its own
GPUs (`CUDA_VISIBLE_DEVICES`), so inside it they count from 0.
"""

from __future__ import annotations

import ctypes
import itertools
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tasuki.launch.config import MAX_WORKERS, ServeConfig, Topology
from tasuki.launch.errors import LaunchError, TopologyError
from tasuki.nvidia_driver import driver_problem

VISIBLE = "CUDA_VISIBLE_DEVICES"
_NAME_BYTES = 128
G = TypeVar("G")


def usable_gpus() -> tuple[str, ...]:
    """The GPUs that this process may use, as `CUDA_VISIBLE_DEVICES` names them.

    None where the driver is too old for the installed PyTorch.
    """
    if driver_problem():
        return ()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        count = ctypes.c_int(0)
        if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
            return ()
    except (OSError, AttributeError):
        return ()
    return _names(count.value, os.environ.get(VISIBLE))


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as the driver describes it.

    Attributes:
        name: Such as `NVIDIA H200`.
        memory_bytes: All of its memory.
    """

    name: str
    memory_bytes: int


def describe_gpus() -> tuple[Gpu, ...]:
    """The GPUs of `usable_gpus`, in its order; none where the driver does not tell."""
    found = []
    name = ctypes.create_string_buffer(_NAME_BYTES)
    memory, device = ctypes.c_size_t(0), ctypes.c_int(0)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        for index in range(len(usable_gpus())):
            if (
                driver.cuDeviceGet(ctypes.byref(device), index)
                or driver.cuDeviceGetName(name, len(name), device)
                or driver.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
            ):
                return ()
            found.append(Gpu(name.value.decode(errors="replace"), memory.value))
    except (OSError, AttributeError):
        return ()
    return tuple(found)


def read_one_another() -> bool:
    """Whether every GPU can read the memory of every other one (peer access)."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        count = ctypes.c_int(0)
        if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
            return True
        can = ctypes.c_int(0)
        for one, other in itertools.permutations(range(count.value), 2):
            if driver.cuDeviceCanAccessPeer(ctypes.byref(can), one, other) or not can.value:
                return False
    except (OSError, AttributeError):
        return True
    return True


def _names(count: int, visible: str | None) -> tuple[str, ...]:
    """Names of the `count` GPUs that the driver shows; it stops at the first bad name."""
    if visible is None:
        return tuple(str(index) for index in range(count))
    return tuple(name.strip() for name in visible.split(","))[:count]


def is_on_gpus(device: str, gpus: Sequence[str]) -> bool:
    """Whether workers told `device` run on GPUs.

    Raises:
        LaunchError: They are told to, and there is none.
    """
    if device.startswith("cuda") and not gpus:
        why = driver_problem() or f"no usable GPU was found (driver, {VISIBLE})"
        raise LaunchError(f"--device is {device}, {why}: use --device cpu")
    return bool(gpus) and device != "cpu"


def default_topology(
    device: str, ranks: Mapping[str, int], gpus: Sequence[str]
) -> tuple[Topology, str | None]:
    """The workers where no role has a number: on GPUs as many mixed workers as there are GPUs.

    A split is the default on CPUs, and where a role has ranks (`--tp-prefill 2`).

    Args:
        device: As in `ServeConfig`.
        ranks: Of one worker, by role.
        gpus: The usable ones.

    Returns:
        The topology, and the reason in one line if it is not the default of CPUs.
    """
    split_ranks = max(ranks.get("prefill", 1), ranks.get("decode", 1))
    if device == "cpu" or not gpus or split_ranks > 1:
        return Topology(), None
    usable, each = len(from_device(device, gpus)), max(ranks.get("mixed", 1), 1)
    workers = min(max(usable // each, 1), MAX_WORKERS)
    return Topology(0, 0, workers), (
        f"--mixed {workers}: no roles are given; GPUs: {usable}, for each worker: {each}"
        " (--prefill and --decode split them)"
    )


def assign_gpus(
    config: ServeConfig,
    gpus: Sequence[str],
    members: Sequence[tuple[str, str]] | None = None,
    taken: Collection[str] = (),
) -> list[tuple[str, ...]]:
    """Each worker's GPUs, one for each of its ranks.

    Args:
        config: Topology, ranks, and the device: with `cuda:N` the N-th GPU is the first.
        gpus: The usable ones.
        members: The workers, see `Topology.members`; None: all of the topology.
        taken: What other workers have of these GPUs.

    Raises:
        TopologyError: There are too few; says how many are needed.
    """
    left = [gpu for gpu in from_device(config.worker.device, gpus) if gpu not in taken]
    workers = config.topology.members() if members is None else members
    needed = [config.ranks_of(role) for _, role in workers]
    if sum(needed) > len(left):
        _, _, first = config.worker.device.partition(":")
        which = f" from number {first} on" if first else ""
        who = str(config.topology) if members is None else ", ".join(name for name, _ in members)
        raise TopologyError(
            f"{who} needs {sum(needed)} GPUs, there are {len(left)}{which}: start"
            f" fewer workers (one GPU is enough for --mixed 1), lower --tp-* or use --device cpu"
        )
    assigned = []
    for count in needed:
        assigned.append(tuple(left[:count]))
        del left[:count]
    return assigned


def from_device(device: str, gpus: Sequence[G]) -> Sequence[G]:
    """The GPUs that `device` leaves: with `cuda:N` those from the N-th on."""
    return gpus[int(device.partition(":")[2] or 0) :]
