"""What one worker is told at start, and what it settles on by itself."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tasuki.errors import TasukiError

ROLES = ("prefill", "decode", "mixed")
DTYPES = ("auto", "float32", "bfloat16")


class ConfigError(TasukiError):
    """A setting is out of its range."""


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """Settings of one worker process.

    Attributes:
        model: Local model folder.
        name: Shown in logs and to the router's operator.
        role: One of `ROLES`; a preference of the router, not a limit.
        host: Address to bind and to tell peers.
        port: 0 picks a free one.
        dtype: One of `DTYPES`; workers exchange KV only within one dtype.
        kv_memory: Bytes for the block pool; None: a share of what is free.
        max_model_len: Tokens, prompt plus output; None: the lesser of model and pool.
        block_size: Tokens in a block.
        max_batched_tokens: Tokens in one step.
        max_running_requests: Requests decoding at once.
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
    dtype: str = "auto"
    kv_memory: int | None = None
    max_model_len: int | None = None
    block_size: int = 16
    max_batched_tokens: int = 512
    max_running_requests: int = 64
    lease_s: float = 10.0
    transport: str = "nixl"
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        _one_of("role", self.role, ROLES)
        _one_of("dtype", self.dtype, DTYPES)
        _in_range("port", self.port, 0, 65_535)
        _in_range("block-size", self.block_size, 1, 1_024)
        _in_range("max-batched-tokens", self.max_batched_tokens, 1, 1 << 20)
        _in_range("max-running-requests", self.max_running_requests, 1, 1 << 16)
        _in_range("lease", self.lease_s, 0.2, 3_600.0)


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} is {value!r}: use one of {', '.join(allowed)}")


def _in_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{name} is {value}: use a value from {low} to {high}")
