"""On which device a worker computes, and in which dtypes: settled once, at start."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from tasuki.models.loader import choose_dtype
from tasuki.models.spec import ModelSpec
from tasuki.worker.config import ConfigError, WorkerConfig

log = logging.getLogger(__name__)

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


def choose_device(wanted: str) -> torch.device:
    """The device that `wanted` means here (`WorkerConfig.device`).

    Raises:
        ConfigError: It is not there; says what is.
    """
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        why = "was built without CUDA" if torch.version.cuda is None else "finds no GPU"
        raise ConfigError(
            f"device is {wanted}, but torch {torch.__version__} {why}: use --device cpu, or check"
            " the driver (nvidia-smi) and CUDA_VISIBLE_DEVICES"
        )
    index, there = int(wanted.partition(":")[2] or 0), torch.cuda.device_count()
    if index >= there:
        raise ConfigError(f"device is {wanted}, there are {there} GPUs: use cuda:0 to {there - 1}")
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    torch.cuda.synchronize(device)  # makes CUDA's context: the transport must find it
    log.info("device %s: %s", device, torch.cuda.get_device_name(device))
    return device


def choose_dtypes(config: WorkerConfig, spec: ModelSpec, device: torch.device) -> Dtypes:
    """What was asked for, or what is good for the model on the device.

    Raises:
        ConfigError: The cache cannot be kept in the dtype that was asked for.
    """
    if config.dtype == "auto":
        model, reason = choose_dtype(spec, device)
        log.info("dtype %s: %s", model, reason)
    else:
        model = _DTYPES[config.dtype]
    kv = model if config.kv_dtype == "auto" else _DTYPES[config.kv_dtype]
    if kv != model and device.type == "cpu":
        raise ConfigError(
            f"kv-dtype is {config.kv_dtype}, on the CPU the KV cache is of the model's dtype"
            f" ({dtype_name(model)}): use auto"
        )
    return Dtypes(model, kv)


def dtype_name(dtype: torch.dtype) -> str:
    """Without `torch.`, as routers are told."""
    return str(dtype).removeprefix("torch.")
