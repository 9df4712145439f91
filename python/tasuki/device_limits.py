"""What a GPU allows a kernel; the one place that asks the device.

`TASUKI_EMULATE_CAPABILITY=8.9` reports a GPU (and, where there is none, the CPU) as one of that
compute capability, with its shared memory, to everything of ours that chooses kernels and
tiles. `TASUKI_EMULATE_NO_FLASHINFER=1` reports FlashInfer as absent. Both are for tests: kernels
are still compiled for the GPU that is there.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass

import torch

from tasuki.errors import TasukiError

CAPABILITY = "TASUKI_EMULATE_CAPABILITY"
NO_FLASHINFER = "TASUKI_EMULATE_NO_FLASHINFER"

# KiB of shared memory: of a thread block at most, and of a multiprocessor.
# Source: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
_SHARED_KIB = {
    (8, 0): (163, 164),
    (8, 6): (99, 100),
    (8, 7): (163, 164),
    (8, 9): (99, 100),
    (9, 0): (227, 228),
    (10, 0): (227, 228),
    (10, 3): (227, 228),
    (12, 0): (99, 100),
    (12, 1): (99, 100),
}
_RESERVED_BYTES = 1 << 10  # of each thread block, by CUDA; same source
_ELSEWHERE = 4  # multiprocessors of what is no GPU


class DeviceLimitsError(TasukiError):
    """The emulated capability is unknown."""


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """Of one device; on a CPU, where kernels are interpreted, nothing limits them.

    Attributes:
        capability: (major, minor); (0, 0) for a CPU.
        shared_bytes: shared memory of a thread block at most.
        shared_bytes_per_core: shared memory of a multiprocessor.
        cores: multiprocessors.
    """

    capability: tuple[int, int]
    shared_bytes: int
    shared_bytes_per_core: int
    cores: int

    def blocks_per_core(self, shared_bytes: int) -> int:
        """Thread blocks of so much shared memory that a multiprocessor runs together."""
        return self.shared_bytes_per_core // (shared_bytes + _RESERVED_BYTES)

    @property
    def has_tma(self) -> bool:
        """Whether kernels can copy blocks of memory by a description of them, as from Hopper on."""
        return self.capability >= (9, 0)

    @property
    def has_fp8(self) -> bool:
        """Whether kernels can convert from and to float8_e4m3fn."""
        return self.capability >= (8, 9) or self.capability == (0, 0)


@functools.cache
def limits_of(device: torch.device) -> DeviceLimits:
    """The limits of a device, or the emulated ones.

    Raises:
        DeviceLimitsError: `TASUKI_EMULATE_CAPABILITY` names no known capability.
    """
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        real = DeviceLimits(
            (properties.major, properties.minor),
            properties.shared_memory_per_block_optin,
            properties.shared_memory_per_multiprocessor,
            properties.multi_processor_count,
        )
    else:
        real = DeviceLimits((0, 0), 1 << 30, 1 << 31, _ELSEWHERE)
    wanted = os.environ.get(CAPABILITY)
    return real if not wanted else _emulated(wanted, real)


def lacks_flashinfer() -> bool:
    """Whether FlashInfer is to be treated as absent."""
    return os.environ.get(NO_FLASHINFER, "") not in ("", "0")


def _emulated(wanted: str, real: DeviceLimits) -> DeviceLimits:
    by_name = {f"{major}.{minor}": (major, minor) for major, minor in _SHARED_KIB}
    if wanted not in by_name:
        raise DeviceLimitsError(f"{CAPABILITY} is {wanted!r}: use one of {', '.join(by_name)}")
    block_kib, core_kib = _SHARED_KIB[by_name[wanted]]
    return DeviceLimits(
        by_name[wanted],
        min(block_kib << 10, real.shared_bytes),
        min(core_kib << 10, real.shared_bytes_per_core),
        real.cores,
    )
