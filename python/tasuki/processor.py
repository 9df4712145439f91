"""The name of this machine's processor."""

from __future__ import annotations

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
