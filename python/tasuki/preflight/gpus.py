"""The GPUs of this machine, as the driver's management library tells: no CUDA context is made."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tasuki.nvidia_driver import driver_problem
from tasuki.preflight.result import Check, fail, ok, warn

_BUSY_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU; `address`: on the PCI bus."""

    index: int
    name: str
    address: str
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Gpus:
    """What the driver tells; `driver`: its version, empty where there is none."""

    driver: str = ""
    gpus: Sequence[Gpu] = ()
    problem: str = ""

    def only(self, addresses: Sequence[str]) -> Gpus:
        """Those at these addresses on the PCI bus; all, if none is."""
        return replace(self, gpus=[g for g in self.gpus if g.address in addresses] or self.gpus)


def look() -> Gpus:
    """Ask the driver."""
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return Gpus()
    try:
        from cuda.bindings import nvml

        nvml.init_v2()
        driver = str(nvml.system_get_driver_version())
        count = int(nvml.device_get_count_v2())
        return Gpus(driver, [_gpu(nvml, index) for index in range(count)], driver_problem() or "")
    except Exception as error:  # of the library's many kinds
        return Gpus(problem=f"{type(error).__name__}: {error}")


def _gpu(nvml: Any, index: int) -> Gpu:
    handle = nvml.device_get_handle_by_index_v2(index)
    memory = nvml.device_get_memory_info_v2(handle)
    name = nvml.device_get_name(handle)
    place = nvml.device_get_pci_info_v3(handle)
    address = f"{int(place.domain):04x}:{int(place.bus):02x}:{int(place.device_):02x}.0"
    return Gpu(index, str(name), address, int(memory.total), int(memory.free))


def gpu_checks(there: Gpus, required: bool) -> list[Check]:
    """Whether there are GPUs, a driver that is new enough, and free memory.

    Args:
        there: What the driver tells.
        required: Whether the worker was told to use one.
    """
    if there.problem:
        make = fail if required else warn
        return [make("GPU", there.problem, "a driver that works", "look at nvidia-smi")]
    if not there.gpus:
        found = f"driver {there.driver}, no GPU" if there.driver else "no NVIDIA driver"
        if required:
            remedy = "install the driver, give the container its GPUs, or use --device cpu"
            return [fail("GPU", found, "a GPU", remedy)]
        return [ok("GPU", f"{found}: workers compute on the CPU")]
    return [_one(there.driver, gpu) for gpu in there.gpus]


def _one(driver: str, gpu: Gpu) -> Check:
    name, used = f"GPU {gpu.index}", gpu.total_bytes - gpu.free_bytes
    found = (
        f"{gpu.name} at {gpu.address}, driver {driver},"
        f" {gpu.free_bytes / 1e9:.1f} of {gpu.total_bytes / 1e9:.1f} GB free"
    )
    if used <= _BUSY_SHARE * gpu.total_bytes:
        return ok(name, found, free_bytes=gpu.free_bytes)
    return warn(
        name,
        found,
        f"less than {_BUSY_SHARE:.0%} in use",
        "end what else runs there (nvidia-smi names it), or lower --gpu-memory-utilization",
        free_bytes=gpu.free_bytes,
    )
