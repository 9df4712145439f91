"""What the launcher asks the operating system."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from tasuki.launch.gpus import usable_gpus
from tasuki.launch.topology import Machine
from tasuki.worker.memory import available_bytes

PREFERRED_PORT = 8000


def look_at_machine() -> Machine:
    """Cores, memory and GPUs that this process may use."""
    return Machine(cores=usable_cores(), free_bytes=available_bytes(), gpus=usable_gpus())


def usable_cores(cgroup: Path = Path("/sys/fs/cgroup")) -> float:
    """CPU cores of this process: its affinity, and the container's quota if there is one."""
    cores = float(len(os.sched_getaffinity(0)))
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
        if quota != "max":
            cores = min(cores, int(quota) / int(period))
    except (OSError, ValueError):
        pass
    return cores


def router_port(host: str, wanted: int | None) -> int:
    """The router's port: the one wanted, else 8000 if it is free, else 0 (any free one)."""
    if wanted is not None:
        return wanted
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, PREFERRED_PORT))
        except OSError:
            return 0
    return PREFERRED_PORT
