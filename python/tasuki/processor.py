"""This machine's processor: its name, and the cores that this process may use."""

from __future__ import annotations

import contextlib
import os
import platform
from pathlib import Path

from tasuki import control_groups

_VERSION_1 = ("quota", "period")


def cpu_name() -> str:
    """Such as `AMD EPYC 7B13`; the architecture where the system has no name."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def usable_cores(cgroup: Path = control_groups.ROOT) -> float:
    """CPU cores of this process: its affinity, and the container's quota if there is one."""
    cores = float(len(os.sched_getaffinity(0)))
    for folder in control_groups.folders("cpu", cgroup):
        with contextlib.suppress(OSError, ValueError):  # no quota
            cores = min(cores, _quota(folder))
    return cores


def _quota(group: Path) -> float:
    """Cores that a control group may use.

    Raises:
        OSError, ValueError: It has no quota.
    """
    if (both := group / "cpu.max").exists():
        quota, period = both.read_text().split()
    else:  # version 1
        quota, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in _VERSION_1)
    if int(quota) <= 0:
        raise ValueError(f"a quota of {quota} is none")
    return int(quota) / int(period)
