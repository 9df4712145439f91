"""What one worker is told at start, and what it settles on by itself."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tasuki.errors import TasukiError
from tasuki.kv.config import DIGESTS, LEASE_RANGE_S
from tasuki.kv.fleet import Fleet

ROLES = ("prefill", "decode", "mixed")
DTYPES = ("auto", "float32", "bfloat16")
KV_DTYPES = ("auto", "bfloat16", "fp8")
LOAD_FORMATS = ("auto", "dummy")
SPECULATE = ("none", "prompt-lookup")
QUANTIZATIONS = ("none", "int8", "fp8")
ALL_REDUCES = ("auto", "nccl", "symmetric")
REQUIRED_TRANSPORTS = ("rdma", "cuda_ipc")
PREFLIGHTS = ("off", "warn", "strict")
MAX_RANKS = 64


class ConfigError(TasukiError):
    """A setting is out of its range."""


DRAFT_TOKENS = 8
"""Of a row's draft, at most."""


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


# Milliseconds. With 9 a step on an H200 has 512 tokens beside 50 decodes of Qwen3-4B's
# shape (gpu_load.json); 100 are ten tokens a second, faster than most people read.
_CUDA_ITL_TARGET_MS = 9.0
_CPU_ITL_TARGET_MS = 100.0
_LONGEST_STEP_S = 1.0
_STEPS_PER_LEASE = 4  # at least, whatever the lease

_CPU_LIMITS = Limits(block_size=16, max_batched_tokens=1_024, max_running_requests=64)

# A block of 32 tokens is megabytes: copying it over NVLink then takes as long as
# posting its descriptor (8.5 us), so posting hides behind copying. 2,048 rows fill
# a GPU's GEMMs; twice as many bring 3 to 4% more prompts of 5,000 tokens through where
# nobody decodes. Steps that decode are bounded in time (`engine/step_size.py`).
_CUDA_LIMITS = Limits(block_size=32, max_batched_tokens=4_096, max_running_requests=256)


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """Settings of one worker process.

    Attributes:
        model: Local model folder.
        name: Shown in logs and to the router's operator.
        role: One of `ROLES`; a preference of the router, not a limit.
        host: Address to bind.
        advertise: Host that routers and peers are told; None: `host`.
        port: 0 picks a free one.
        tensor_parallel: Ranks that the model is divided among, each a process with a
            GPU of its own; on the CPU with a share of the cores.
        nodes: Hosts that the ranks are divided among, in order: HOST:PORT, where the others come,
            then their addresses; empty: all ranks are here.
        rank: This host's number among them.
        all_reduce: One of `ALL_REDUCES`, how GPUs' ranks add up: `nccl` alone; `symmetric`
            memory for sums up to 10 MiB; `auto`: `symmetric`, and `nccl` where that does not work.
        dispatch: What computes GEMMs on a GPU: `default`; `measured`: what was the fastest on
            this machine, timed at the first start; or a file that `measured` wrote.
        device: `auto` (CUDA if there is a GPU), `cpu`, `cuda` or `cuda:N` (from the N-th
            GPU on).
        dtype: One of `DTYPES`; workers exchange KV only within one dtype.
        kv_dtype: One of `KV_DTYPES`, of the cache; `auto`: as `dtype`.
        load_format: One of `LOAD_FORMATS`; `dummy`: random weights of the model's shape.
        quantization: One of `QUANTIZATIONS`; `int8`: weights of 8 bits, on the CPU; everything
            else, and the cache, is in bfloat16. `fp8`: weights of GEMMs in float8_e4m3fn.
        speculate: One of `SPECULATE`; `prompt-lookup`: rows draft what followed their last tokens
            earlier in prompt or answer, where that pays (`engine/drafts.py`); on the CPU.
        kv_memory: Bytes for the block pool of all ranks; None: a share of what is free.
        gpu_memory_utilization: Share of a GPU's memory for weights, activations and
            pool; the rest is for CUDA graphs and what else runs there.
        max_model_len: Tokens, prompt plus output; None: the lesser of model and pool.
        block_size, max_batched_tokens, max_running_requests: See `Limits`; None: what
            is good for the device.
        itl_target_ms: How long a step that decodes may take with prompts in it, in
            milliseconds; None: what is good for the device, 0: bounded in tokens only.
        lease_s: How long announced blocks are kept for a silent decode worker.
        step_timeout_s: A step that takes longer, and 50 times what was expected of it, is
            hung: the worker ends, and is started again by the launcher.
        pull_timeout_s: A pull without progress for so long is given up: its request is
            placed again, or fails (the router's `--on-kv-loss`).
        kv_digest: One of `tasuki.kv.config.DIGESTS`: whether KV that is pulled is compared with
            digests of what the prefill worker announced: never, one unit in 16, all.
        drain_s: After SIGTERM, how long running legs and leases may take; 0: the worker ends
            at once, and routers place its requests again.
        state_log_s: Between lines of the log that say what the worker does; 0: none.
        transport: Name of the KV transport: `nixl`, or `host-staged` for GPUs that cannot read one
            another.
        require_transport: One of `REQUIRED_TRANSPORTS`: a peer whose KV would travel by a slower
            way is refused. Empty: none is.
        rdma_devices: `nearest` to the GPU of each rank, `all`, or names with commas.
        preflight: One of `PREFLIGHTS`: whether the machine is checked first, and whether a
            failure ends the start.
        pause: Wait, before anything is loaded, until told by HTTP to go on.
        pause_host, pause_port: Where; a host that is no loopback address requires a token.
        termination_log: Gets what ends the start; None: /dev/termination-log where it exists.
        trust_remote_code: Run code that came with the model folder.
        fleet_cert, fleet_key, fleet_ca: See `tasuki.kv.fleet.Fleet`; all of them, or none.
    """

    model: Path
    name: str = "worker"
    served_name: str = ""
    role: str = "mixed"
    host: str = "127.0.0.1"
    advertise: str | None = None
    port: int = 0
    tensor_parallel: int = 1
    nodes: tuple[str, ...] = ()
    rank: int = 0
    all_reduce: str = "auto"
    dispatch: str = "default"
    device: str = "auto"
    dtype: str = "auto"
    kv_dtype: str = "auto"
    load_format: str = "auto"
    quantization: str = "none"
    speculate: str = "none"
    kv_memory: int | None = None
    gpu_memory_utilization: float = 0.9
    max_model_len: int | None = None
    block_size: int | None = None
    max_batched_tokens: int | None = None
    max_running_requests: int | None = None
    itl_target_ms: float | None = None
    lease_s: float = 10.0
    step_timeout_s: float = 30.0
    pull_timeout_s: float = 30.0
    kv_digest: str = "off"
    drain_s: float = 30.0
    state_log_s: float = 10.0
    transport: str = "nixl"
    require_transport: str = ""
    rdma_devices: str = "nearest"
    preflight: str = "warn"
    pause: bool = False
    pause_host: str = "127.0.0.1"
    pause_port: int = 0
    termination_log: Path | None = None
    trust_remote_code: bool = False
    fleet_cert: Path | None = None
    fleet_key: Path | None = None
    fleet_ca: Path | None = None

    def __post_init__(self) -> None:
        Fleet.of(self.fleet_cert, self.fleet_key, self.fleet_ca)
        _one_of("role", self.role, ROLES)
        check_device(self.device)
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("kv-dtype", self.kv_dtype, KV_DTYPES)
        _one_of("load-format", self.load_format, LOAD_FORMATS)
        _one_of("quantization", self.quantization, QUANTIZATIONS)
        _one_of("speculate", self.speculate, SPECULATE)
        if self.quantization == "int8" and self.dtype == "float32":
            raise ConfigError("quantization is int8, dtype is float32: use auto or bfloat16")
        if self.quantization == "int8" and self.tensor_parallel > 1:
            raise ConfigError(f"quantization is int8, tp is {self.tensor_parallel}: use tp 1")
        _one_of("kv-digest", self.kv_digest, tuple(DIGESTS))
        _one_of("all-reduce", self.all_reduce, ALL_REDUCES)
        _one_of("require-transport", self.require_transport, ("", *REQUIRED_TRANSPORTS))
        _one_of("preflight", self.preflight, PREFLIGHTS)
        _in_range("port", self.port, 0, 65_535)
        _in_range("pause-port", self.pause_port, 0, 65_535)
        _in_range("tp", self.tensor_parallel, 1, MAX_RANKS)
        self._check_nodes()
        _in_range("gpu-memory-utilization", self.gpu_memory_utilization, 0.01, 1.0)
        _in_range("max-model-len", self.max_model_len, 1, 1 << 30)
        _in_range("block-size", self.block_size, 1, 1_024)
        _in_range("max-batched-tokens", self.max_batched_tokens, 1, 1 << 20)
        _in_range("max-running-requests", self.max_running_requests, 1, 1 << 16)
        _in_range("itl-target-ms", self.itl_target_ms, 0.0, 60_000.0)
        _in_range("lease-s", self.lease_s, *LEASE_RANGE_S)
        _in_range("step-timeout-s", self.step_timeout_s, 2.0, 86_400.0)
        _in_range("pull-timeout-s", self.pull_timeout_s, 0.1, 86_400.0)
        _in_range("drain-s", self.drain_s, 0.0, 86_400.0)
        _in_range("state-log-s", self.state_log_s, 0.0, 86_400.0)

    def _check_nodes(self) -> None:
        count = len(self.nodes)
        _in_range("rank", self.rank, 0, max(0, count - 1))
        if count == 1 or (count and self.tensor_parallel % count):
            raise ConfigError(
                f"nodes has {count} hosts, tp is {self.tensor_parallel}: use 2 hosts or more, and a"
                " tp that is a multiple of their number"
            )
        if count and self.all_reduce == "symmetric":
            raise ConfigError("all-reduce is symmetric, which one host has: use nccl with --nodes")

    @property
    def ranks_here(self) -> int:
        """Ranks on each host."""
        return self.tensor_parallel // max(1, len(self.nodes))

    @property
    def fleet(self) -> Fleet | None:
        """Certificates of the connections with routers and other workers; None: plain."""
        return Fleet.of(self.fleet_cert, self.fleet_key, self.fleet_ca)

    @property
    def reachable_host(self) -> str:
        """Where routers and peers reach this worker; its network carries the KV."""
        return self.advertise or self.host

    def endpoint(self, port: int) -> str:
        """`host:port` that routers and peers are told, for the port that was bound."""
        return join_host_port(self.reachable_host, port)

    def limits(self, on_cuda: bool) -> Limits:
        """What was asked for, the rest as is good for the device, whatever the role."""
        good = _CUDA_LIMITS if on_cuda else _CPU_LIMITS
        return Limits(
            block_size=self.block_size or good.block_size,
            max_batched_tokens=self.max_batched_tokens or good.max_batched_tokens,
            max_running_requests=self.max_running_requests or good.max_running_requests,
        )

    def itl_target_s(self, on_cuda: bool) -> float | None:
        """How long a step that decodes may take with prompts in it; None: not bounded."""
        good_ms = _CUDA_ITL_TARGET_MS if on_cuda else _CPU_ITL_TARGET_MS
        target_ms = good_ms if self.itl_target_ms is None else self.itl_target_ms
        return target_ms / 1e3 or None

    @property
    def longest_step_s(self) -> float:
        """How long a step that only computes prompts may take: well within a lease."""
        return min(_LONGEST_STEP_S, self.lease_s / _STEPS_PER_LEASE)


def join_host_port(host: str, port: int) -> str:
    """`host:port`, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


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
