"""What the NVIDIA driver says, and whether it is new enough for the installed PyTorch.

PyTorch is not loaded for it.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import re
from pathlib import Path

# The least driver for each major version of CUDA, on Linux.
# Source: CUDA Toolkit release notes, "CUDA minor version compatibility".
_LEAST_DRIVER = {12: "525.60.13", 13: "580.65.06"}

_PCI_ADDRESS_BYTES = 32


def driver_problem() -> str | None:
    """Why PyTorch cannot use the driver, and the remedy; None: it can, or there is no driver."""
    driver, torch_cuda = driver_cuda(), torch_cuda_version()
    if driver is None or torch_cuda is None or driver[0] >= torch_cuda[0]:
        return None
    least = _LEAST_DRIVER.get(torch_cuda[0])
    needed = f"{least} or newer" if least else f"one for CUDA {torch_cuda[0]}"
    return (
        f"the NVIDIA driver supports CUDA up to {driver[0]}.{driver[1]}, torch"
        f" {importlib.metadata.version('torch')} takes CUDA {torch_cuda[0]}.{torch_cuda[1]}"
        f" (install driver {needed}, or a torch for CUDA {driver[0]})"
    )


def driver_cuda() -> tuple[int, int] | None:
    """The newest CUDA version that the driver supports; None: there is no driver."""
    version = ctypes.c_int(0)
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)):
            return None
    except (OSError, AttributeError):
        return None
    return version.value // 1000, version.value % 1000 // 10


def pci_address(index: int) -> str:
    """Where a GPU is, for example `0000:18:00.0`; empty where the driver does not say.

    Args:
        index: Among the GPUs that this process sees.
    """
    name = ctypes.create_string_buffer(_PCI_ADDRESS_BYTES)
    device = ctypes.c_int(0)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        failed = (
            driver.cuInit(0)
            or driver.cuDeviceGet(ctypes.byref(device), index)
            or driver.cuDeviceGetPCIBusId(name, len(name), device)
        )
    except (OSError, AttributeError):
        return ""
    return "" if failed else name.value.decode().lower()


def torch_cuda_version() -> tuple[int, int] | None:
    """The CUDA version of the installed torch; None: it has none."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = Path(spec.origin).with_name("version.py").read_text()
    found = re.search(r"^cuda\b[^=\n]*= *['\"](\d+)\.(\d+)", text, re.MULTILINE)
    return (int(found[1]), int(found[2])) if found else None
