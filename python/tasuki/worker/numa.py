"""A rank on a GPU stays on the GPU's NUMA node: its threads, and the memory that they pin.

Copies between a GPU and memory of another node cross the link between the processors. Where the
operator has restricted the CPUs already (numactl, taskset, a container's CPU set), nothing is
changed. Main thread, before others are started; they inherit it.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
from collections.abc import Iterable
from pathlib import Path

from tasuki.kv.rdma_devices import SYSFS, pci_place

log = logging.getLogger(__name__)

_PREFERRED = 1  # MPOL_PREFERRED: another node where this one is full. Source: set_mempolicy(2)
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}  # numbers of the system call


def stay_near(gpu: str, sysfs: Path = SYSFS) -> str:
    """Bind this process to the NUMA node of a GPU.

    Args:
        gpu: Its PCI address; empty: there is none.
        sysfs: Where the kernel describes devices.

    Returns:
        What was done, or why nothing was.
    """
    place = pci_place(gpu, sysfs) if gpu else None
    if place is None or place.numa_node < 0:
        return "NUMA: the GPU's node is not known"
    allowed = os.sched_getaffinity(0)
    if allowed != all_cpus(sysfs):
        return "NUMA: the CPUs of this process are restricted already"
    near = allowed & cpus_of_node(place.numa_node, sysfs)
    if not near or near == allowed:
        return "NUMA: one node"
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), near)
    _prefer_memory_of(place.numa_node)
    return f"NUMA: {len(near)} CPUs and the memory of node {place.numa_node}, the GPU's"


def cpus_of_node(node: int, sysfs: Path = SYSFS) -> set[int]:
    """The CPUs of a NUMA node; none where there is no such node."""
    return _listed(sysfs / "devices" / "system" / "node" / f"node{node}" / "cpulist")


def all_cpus(sysfs: Path = SYSFS) -> set[int]:
    """All CPUs that the machine has online."""
    return _listed(sysfs / "devices" / "system" / "cpu" / "online")


def _listed(path: Path) -> set[int]:
    """The numbers of a list such as `0-3,8`."""
    try:
        return set(_numbers(path.read_text().strip()))
    except (OSError, ValueError):
        return set()


def _numbers(text: str) -> Iterable[int]:
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def _prefer_memory_of(node: int) -> None:
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        return
    mask = ctypes.c_ulong(1 << node)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(number, _PREFERRED, ctypes.byref(mask), 8 * ctypes.sizeof(mask)):
        log.warning("NUMA: memory of node %d: %s", node, os.strerror(ctypes.get_errno()))
