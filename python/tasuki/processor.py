"""This machine's processor: its name, and the cores that this process may use."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def cpu_name() -> str:
    """Such as `AMD EPYC 7B13`; the architecture where the system has no name."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


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
