"""What one worker is told at start, and what it settles on by itself."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from tasuki.errors import TasukiError

ROLES = ("prefill", "decode", "mixed")
DTYPES = ("auto", "float32", "bfloat16")
KV_DTYPES = ("auto", "bfloat16", "fp8")
LOAD_FORMATS = ("auto", "dummy")
ALL_REDUCES = ("auto", "nccl", "symmetric")
MAX_RANKS = 64


class ConfigError(TasukiError):
    """A setting is out of its range."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How much a worker does at once; what is good depends on the device.

    Attributes:
        block_size: Tokens in a block.
        max_batched_tokens: Tokens in one step.
        max_running_requests: Requests decoding at once.
    """

    block_size: int
    max_batched_tokens: int
    max_running_requests: int


_CPU_LIMITS = Limits(block_size=16, max_batched_tokens=1_024, max_running_requests=64)

# A block of 32 tokens is megabytes: copying it over NVLink then takes as long as
# posting its descriptor (8.5 us), so posting hides behind copying. 2,048 rows fill
# a GPU's matrix products; more would make a step, and with it everybody's next
# token, longer. Where nobody decodes, twice as many bring 3 to 4% more prompts of
# 5,000 tokens through, and the end of their KV comes 1.4 ms later.
_CUDA_LIMITS = Limits(block_size=32, max_batched_tokens=2_048, max_running_requests=256)
_CUDA_PREFILL_LIMITS = replace(_CUDA_LIMITS, max_batched_tokens=4_096)


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """Settings of one worker process.

    Attributes:
        model: Local model folder.
        name: Shown in logs and to the router's operator.
        role: One of `ROLES`; a preference of the router, not a limit.
        host: Address to bind and to tell peers.
        port: 0 picks a free one.
        tensor_parallel: Ranks that the model is divided among, each a process with a
            GPU of its own; on the CPU with a share of the cores.
        all_reduce: One of `ALL_REDUCES`, how GPUs' ranks add up: `nccl` alone; `symmetric`
            memory for sums up to 10 MiB; `auto`: `symmetric`, and `nccl` where that does not work.
        device: `auto` (CUDA if there is a GPU), `cpu`, `cuda` or `cuda:N` (from the N-th
            GPU on).
        dtype: One of `DTYPES`; workers exchange KV only within one dtype.
        kv_dtype: One of `KV_DTYPES`, of the cache; `auto`: as `dtype`.
        load_format: One of `LOAD_FORMATS`; `dummy`: random weights of the model's shape.
        kv_memory: Bytes for the block pool of all ranks; None: a share of what is free.
        gpu_memory_utilization: Share of a GPU's memory for weights, activations and
            pool; the rest is for CUDA graphs and what else runs there.
        max_model_len: Tokens, prompt plus output; None: the lesser of model and pool.
        block_size, max_batched_tokens, max_running_requests: See `Limits`; None: what
            is good for the role on the device.
        lease_s: How long announced blocks are kept for a silent decode worker.
        transport: Name of the KV transport.
        trust_remote_code: Run code that came with the model folder.
    """

    model: Path
    name: str = "worker"
    served_name: str = ""
    role: str = "mixed"
    host: str = "127.0.0.1"
    port: int = 0
    tensor_parallel: int = 1
    all_reduce: str = "auto"
    device: str = "auto"
    dtype: str = "auto"
    kv_dtype: str = "auto"
    load_format: str = "auto"
    kv_memory: int | None = None
    gpu_memory_utilization: float = 0.9
    max_model_len: int | None = None
    block_size: int | None = None
    max_batched_tokens: int | None = None
    max_running_requests: int | None = None
    lease_s: float = 10.0
    transport: str = "nixl"
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        _one_of("role", self.role, ROLES)
        check_device(self.device)
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("kv-dtype", self.kv_dtype, KV_DTYPES)
        _one_of("load-format", self.load_format, LOAD_FORMATS)
        _one_of("all-reduce", self.all_reduce, ALL_REDUCES)
        _in_range("port", self.port, 0, 65_535)
        _in_range("tp", self.tensor_parallel, 1, MAX_RANKS)
        _in_range("gpu-memory-utilization", self.gpu_memory_utilization, 0.01, 1.0)
        _in_range("max-model-len", self.max_model_len, 1, 1 << 30)
        _in_range("block-size", self.block_size, 1, 1_024)
        _in_range("max-batched-tokens", self.max_batched_tokens, 1, 1 << 20)
        _in_range("max-running-requests", self.max_running_requests, 1, 1 << 16)
        _in_range("lease", self.lease_s, 0.2, 3_600.0)

    def limits(self, on_cuda: bool) -> Limits:
        """What was asked for, the rest as is good for the role on the device."""
        good = _CPU_LIMITS
        if on_cuda:
            good = _CUDA_PREFILL_LIMITS if self.role == "prefill" else _CUDA_LIMITS
        return Limits(
            block_size=self.block_size or good.block_size,
            max_batched_tokens=self.max_batched_tokens or good.max_batched_tokens,
            max_running_requests=self.max_running_requests or good.max_running_requests,
        )


def check_device(device: str) -> None:
    """Refuse what names no device.

    Raises:
        ConfigError: With the value and what there is.
    """
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
        raise ConfigError(f"device is {device!r}: use auto, cpu, cuda or cuda:N")


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} is {value!r}: use one of {', '.join(allowed)}")


def _in_range(name: str, value: float | None, low: float, high: float) -> None:
    if value is not None and not low <= value <= high:
        raise ConfigError(f"{name} is {value}: use a value from {low} to {high}")
