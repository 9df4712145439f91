"""Which GPUs there are, and which worker gets which.

The launcher loads no torch: it asks the driver. A worker sees only its own
GPUs (`CUDA_VISIBLE_DEVICES`), so inside it they count from 0.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence

from tasuki.launch.config import ServeConfig
from tasuki.launch.errors import LaunchError, TopologyError

VISIBLE = "CUDA_VISIBLE_DEVICES"


def usable_gpus() -> tuple[str, ...]:
    """The GPUs that this process may use, as `CUDA_VISIBLE_DEVICES` names them."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        count = ctypes.c_int(0)
        if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
            return ()
    except (OSError, AttributeError):
        return ()
    return _names(count.value, os.environ.get(VISIBLE))


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
        raise LaunchError(
            f"--device is {device}, no usable GPU was found (driver, {VISIBLE}): use --device cpu"
        )
    return bool(gpus) and device != "cpu"


def assign_gpus(config: ServeConfig, gpus: Sequence[str]) -> list[tuple[str, ...]]:
    """Each worker's GPUs, one for each of its ranks, in the order of `Topology.members`.

    Args:
        config: Topology, ranks, and the device: with `cuda:N` the N-th GPU is the first.
        gpus: The usable ones.

    Raises:
        TopologyError: There are too few; says how many are needed.
    """
    first = int(config.device.partition(":")[2] or 0)
    left = list(gpus[first:])
    needed = config.ranks
    if sum(needed) > len(left):
        which = f" from number {first} on" if first else ""
        raise TopologyError(
            f"{config.topology} needs {sum(needed)} GPUs, there are {len(left)}{which}: start"
            f" fewer workers (one GPU is enough for --mixed 1) or use --device cpu"
        )
    assigned = []
    for count in needed:
        assigned.append(tuple(left[:count]))
        del left[:count]
    return assigned
