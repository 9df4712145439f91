"""Kernels that begin while the one before them ends: programmatic dependent launch.

Such a kernel waits (`gdc_wait`) before it touches memory, and lets the next one begin
(`gdc_launch_dependents`) when it has only its ends to write: what a launch costs is then
paid while the kernel before it still runs, in CUDA graphs too. Every kernel launched so
waits for all before it, so it does not matter which of its neighbours know of this.
"""

from __future__ import annotations

import torch

from tasuki.device_limits import limits_of

_FIRST_CAPABILITY = (9, 0)


def overlaps(device: torch.device) -> bool:
    """Whether kernels can be launched so on this device."""
    return limits_of(device).capability >= _FIRST_CAPABILITY
