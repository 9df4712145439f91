"""On which device a worker computes, and in which dtypes: settled once, at start."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

import torch

from tasuki.kv.net_devices import Network
from tasuki.models.loader import choose_dtype
from tasuki.models.spec import ModelSpec
from tasuki.nvidia_driver import driver_problem, pci_address
from tasuki.processor import cpu_name
from tasuki.worker.config import ConfigError, WorkerConfig
from tasuki.worker.numa import stay_near

log = logging.getLogger(__name__)

_VISIBLE = "CUDA_VISIBLE_DEVICES"

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
}


@dataclass(frozen=True, slots=True)
class Dtypes:
    """Of weights and activations, and of the KV cache."""

    model: torch.dtype
    kv: torch.dtype


def device_name(device: torch.device) -> str:
    """The hardware's name, as it tells workers of different speed apart."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{cpu_name()}, {torch.get_num_threads()} threads"


def choose_device(wanted: str, ranks: int = 1) -> torch.device:
    """The first rank's device, if `wanted` is what was said (`WorkerConfig.device`).

    Call it before anything else uses CUDA: with `cuda:N` this process, and the
    ranks that it starts, then see no GPUs but the worker's own, and rank r's is
    number r of them. The first one is the current one of every thread.

    Raises:
        ConfigError: There are not enough; says what there is.
    """
    if wanted.startswith("cuda:"):
        _see_only(wanted, ranks)
    if wanted == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        problem = driver_problem()
        if wanted == "auto":
            if problem:
                log.warning("using the CPU: %s", problem)
            return torch.device("cpu")
        if problem:
            raise ConfigError(f"device is {wanted}, but {problem}: use --device cpu")
        why = "was built without CUDA" if torch.version.cuda is None else "finds no such GPU"
        raise ConfigError(
            f"device is {wanted}, but torch {torch.__version__} {why}: use --device cpu, or check"
            f" the driver (nvidia-smi) and {_VISIBLE}"
        )
    if ranks > 1 and torch.cuda.device_count() < ranks:
        raise ConfigError(
            f"tp is {ranks}, {torch.cuda.device_count()} GPUs can be seen: a rank needs one of its"
            f" own; lower tp or check {_VISIBLE}"
        )
    return use_device(torch.device("cuda", 0))


def use_device(device: torch.device) -> torch.device:
    """Make a device this thread's current one, and CUDA's context there."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.synchronize(device)  # makes the context: the transport must find it
        log.info("device %s: %s", device, torch.cuda.get_device_name(device))
        log.info("%s", stay_near(gpu_address(device)))
    return device


def gpu_address(device: torch.device) -> str:
    """The PCI address of a GPU; empty: it is none."""
    return pci_address(device.index or 0) if device.type == "cuda" else ""


def network_of(config: WorkerConfig, device: torch.device) -> Network:
    """What the transfers of the rank on `device` may use."""
    return Network(
        host=config.reachable_host,
        gpu=gpu_address(device),
        rdma=config.rdma_devices,
        require=config.require_transport,
    )


def _see_only(wanted: str, ranks: int) -> None:
    """Hide all GPUs but `ranks` of those that can be seen, from the one wanted on."""
    first = int(wanted.partition(":")[2])
    visible = os.environ.get(_VISIBLE)
    if visible is None:
        own = [str(index) for index in range(first, first + ranks)]
    else:
        names = [name for name in visible.split(",") if name.strip()]
        own = names[first : first + ranks]
        if len(own) < ranks:
            for_ranks = f" for {ranks} ranks" if ranks > 1 else ""
            raise ConfigError(
                f"device is {wanted}{for_ranks}, {_VISIBLE} is {visible!r}: it names {len(names)};"
                " use a lower cuda:N or tp"
            )
    os.environ[_VISIBLE] = ",".join(own)


def choose_dtypes(config: WorkerConfig, spec: ModelSpec, device: torch.device) -> Dtypes:
    """What was asked for, or what is good for the model on the device.

    Raises:
        ConfigError: The cache cannot be kept in the dtype that was asked for.
    """
    if config.dtype == "auto" and config.quantization != "none":
        model = torch.bfloat16
    elif config.dtype == "auto":
        model, reason = choose_dtype(spec, device)
        log.info("dtype %s", reason)
    else:
        model = _DTYPES[config.dtype]
    kv = model if config.kv_dtype == "auto" else _DTYPES[config.kv_dtype]
    if kv not in (model, torch.float8_e4m3fn) and device.type == "cpu":
        raise ConfigError(
            f"kv-dtype is {config.kv_dtype}, on the CPU the KV cache is of the model's dtype"
            f" ({dtype_name(model)}) or fp8: use auto"
        )
    return Dtypes(model, kv)


def dtype_name(dtype: torch.dtype) -> str:
    """Without `torch.`, as routers are told."""
    return str(dtype).removeprefix("torch.")
