"""What one worker is told at start, and what it settles on by itself."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tasuki.errors import TasukiError
from tasuki.kv import backends
from tasuki.kv.config import DIGESTS, LEASE_RANGE_S
from tasuki.kv.fleet import Fleet
from tasuki.options import first_refused, option

ROLES = ("prefill", "decode", "mixed")
MAX_RANKS = 64
KEY_VARIABLE = "TASUKI_NODES_KEY"  # the secret of the hosts of --nodes


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
    """Settings of one worker process: the options of `tasuki worker`, and the model's folder.

    A field's help says what it means. To add an option, add a field here and use it: the command
    lines of `tasuki worker` and `tasuki serve`, and what the launcher passes on, follow.

    Attributes:
        model: Local model folder; the launcher fills it in once it has the model.
    """

    model: Path = Path()
    role: str = option(
        "mixed",
        "prefill, decode or mixed: a preference of the router.",
        metavar="ROLE",
        choices=ROLES,
        serve=False,
    )
    name: str = option("worker", "Name in logs.", serve=False)
    served_name: str = option(
        "", "Name of the model, told to routers [the folder's name].", serve=False
    )
    host: str = option("127.0.0.1", "Address the worker binds [127.0.0.1].", serve=False)
    advertise: str | None = option(
        None,
        "Host where routers and other workers reach the worker; KV moves over its network"
        " [--host].",
        metavar="HOST",
        serve=False,
    )
    port: int = option(0, "Port to bind [0: any free one].", bounds=(0, 65_535), serve=False)
    # Each rank is a process; on the CPU it has a share of the cores.
    tensor_parallel: int = option(
        1,
        "Ranks that divide the model, each with a GPU of its own [1].",
        flag="--tp",
        bounds=(1, MAX_RANKS),
        serve=False,
    )
    nodes: tuple[str, ...] = option(
        (),
        "Hosts that divide the model, with commas between them: HOST:PORT of the first, where the"
        " others come to, then their addresses. Each runs this command with its own --rank and the"
        " same secret in TASUKI_NODES_KEY [all ranks are here].",
        metavar="HOST:PORT,HOST,...",
        serve=False,
    )
    rank: int = option(0, "Number of this host among --nodes, from 0 [0].", serve=False)
    device: str = option(
        "auto",
        "auto, cpu, cuda or cuda:N, from the N-th GPU on [auto: the GPUs, if there are any].",
        metavar="DEVICE",
    )
    # Workers exchange KV only within one dtype.
    dtype: str = option(
        "auto",
        "auto, float32 or bfloat16 [auto: the faster one here].",
        metavar="DTYPE",
        choices=("auto", "float32", "bfloat16"),
    )
    kv_dtype: str = option(
        "auto",
        "auto, bfloat16 or fp8, of the KV cache [auto: as --dtype].",
        metavar="DTYPE",
        choices=("auto", "bfloat16", "fp8"),
    )
    load_format: str = option(
        "auto",
        "auto, or dummy: random weights, for measurements [auto].",
        metavar="FORMAT",
        choices=("auto", "dummy"),
    )
    # int8: the cache is in bfloat16, too. fp8: weights are float8_e4m3fn.
    quantization: str = option(
        "none",
        "none, int8 (Llama family on the CPU) or fp8 (Llama family), of the weights of GEMMs;"
        " everything else is bfloat16. Folders with fp8 weights need no option [none].",
        metavar="KIND",
        choices=("none", "int8", "fp8"),
    )
    speculate: str = option(
        "none",
        "none or prompt-lookup: drafts from a request's own tokens, answers stay the same; CPU"
        " [none].",
        metavar="KIND",
        choices=("none", "prompt-lookup"),
    )
    kv_memory: int | None = option(
        None,
        "KV pool of one worker, e.g. 2GB [CPU: an eighth of the free memory, less if that is"
        " plenty; GPU: see --gpu-memory-utilization].",
        metavar="BYTES",
        in_bytes=True,
    )
    # For weights, activations and pool; the rest is for CUDA graphs and what else runs there.
    gpu_memory_utilization: float = option(
        0.9,
        "Share of a GPU's memory that its worker may use [0.9].",
        bounds=(0.01, 1.0),
        by_role=True,
    )
    max_model_len: int | None = option(
        None,
        "Longest request, prompt and output, in tokens [the lesser of model and pool].",
        bounds=(2, None),
        range_in_help=True,
    )
    block_size: int | None = option(
        None, "Tokens in a KV block [CPU 16, GPU 32].", bounds=(1, 1_024), by_role=True
    )
    max_batched_tokens: int | None = option(
        None,
        "Tokens in one engine step, at most [CPU 1024, GPU 4096].",
        bounds=(1, 1 << 20),
        by_role=True,
    )
    max_running_requests: int | None = option(
        None,
        "Requests decoding at once in a worker [CPU 64, GPU 256].",
        bounds=(1, 1 << 16),
        by_role=True,
    )
    itl_target_ms: float | None = option(
        None,
        "Duration of a step that decodes and computes prompts: bounds the gap between two tokens"
        " while others' prompts come, four times as long where many wait, and never less than"
        " 1.8 times a step that only decodes (2.25 up to 512 tokens). Where even a few prompt"
        " tokens take longer than it leaves, as beside few decodes of a model with experts, a"
        " step's prompts take about half as long again as those few. 0: no bound but"
        " --max-batched-tokens [GPU 9, CPU 100].",
        bounds=(0.0, 60_000.0),
        by_role=True,
    )
    lease_s: float = option(
        10.0,
        "How long announced KV is kept for a silent peer, in seconds [10].",
        bounds=LEASE_RANGE_S,
    )
    step_timeout_s: float = option(
        30.0,
        "A step that takes longer, and 50 times what was expected, is hung: its worker ends and"
        " is started again, in seconds [30].",
        bounds=(2.0, 86_400.0),
        by_role=True,
    )
    pull_timeout_s: float = option(
        30.0,
        "A KV transfer without progress for so long is given up: the request is placed again,"
        " in seconds [30].",
        bounds=(0.1, 86_400.0),
    )
    kv_digest: str = option(
        "off",
        "off, sample or all: which KV that is pulled is compared with digests that the prefill"
        " worker made of it; a mismatch counts as lost KV [off].",
        metavar="WHICH",
        choices=tuple(DIGESTS),
    )
    drain_s: float = option(
        30.0,
        "After SIGTERM the worker gets no new requests, and what runs may take so many seconds"
        " [30]; 0: it ends at once, and routers place its requests again.",
        bounds=(0.0, 86_400.0),
        serve=False,
    )
    state_log_s: float = option(
        10.0,
        "Seconds between lines of a worker's log that say what it does while it has work [10]; 0:"
        " none.",
        bounds=(0.0, 86_400.0),
    )
    # symmetric: memory for sums up to 10 MiB. auto: nccl where that does not work.
    all_reduce: str = option(
        "auto",
        "auto, nccl or symmetric: how the GPUs of a worker add up [auto: symmetric].",
        metavar="WAY",
        choices=("auto", "nccl", "symmetric"),
    )
    dispatch: str = option(
        "default",
        "default, measured or a file that `measured` wrote: which implementation computes which"
        " GEMMs on a GPU [default].",
        metavar="WAY",
        by_role=True,
    )
    transport: str | None = option(
        None,
        f"How KV moves, the same in all workers: {backends.described()} [nixl-ucx; serve:"
        " host-staged where GPUs cannot read one another].",
        metavar="NAME",
        choices=backends.names(),
    )
    require_transport: str = option(
        "",
        "rdma or cuda_ipc: refuse a worker whose KV would travel by TCP; with cuda_ipc, by anything"
        " else. rdma allows what stays inside a machine [nothing is refused].",
        metavar="WAY",
        choices=("rdma", "cuda_ipc"),
    )
    rdma_devices: str = option(
        "nearest",
        "nearest, all, or names such as mlx5_0:1,mlx5_1:1: the RDMA devices of a worker [nearest"
        " to the GPU of each rank].",
        metavar="NAMES",
    )
    preflight: str = option(
        "warn",
        "off, warn or strict: check the machine before a worker loads anything; with strict a"
        " failure ends it with exit status 78 [warn].",
        metavar="MODE",
        choices=("off", "warn", "strict"),
    )
    pause: bool = option(
        False, "Wait, before anything is loaded, until POST /exit: for tests by hand.", serve=False
    )
    pause_host: str = option(
        "127.0.0.1",
        "Address that answers during --pause; beyond loopback it requires the token in"
        " TASUKI_PAUSE_TOKEN [127.0.0.1].",
        serve=False,
    )
    pause_port: int = option(
        0, "Its port [0: any free one, which the log names].", bounds=(0, 65_535), serve=False
    )
    termination_log: Path | None = option(
        None,
        "File that gets what preflight found, if that ends the start [/dev/termination-log, where"
        " it exists].",
        metavar="PATH",
        serve=False,
    )
    trust_remote_code: bool = option(False, "Run code that comes with the model folder.")
    fleet_cert: Path | None = option(
        None,
        "Certificate chain in PEM, with the DNS name tasuki. With it, --fleet-key and --fleet-ca,"
        " routers and workers speak by mTLS alone.",
        metavar="PATH",
    )
    fleet_key: Path | None = option(None, "Private key in PEM, of --fleet-cert.", metavar="PATH")
    fleet_ca: Path | None = option(
        None,
        "Certificates in PEM of the CA that the others' certificates must come from.",
        metavar="PATH",
    )

    def __post_init__(self) -> None:
        Fleet.of(self.fleet_cert, self.fleet_key, self.fleet_ca)
        check_device(self.device)
        if refused := first_refused(self):
            name, value, allowed = refused
            raise ConfigError(f"{name} is {value!r}: use {allowed}")
        if self.quantization == "int8" and self.dtype == "float32":
            raise ConfigError("quantization is int8, dtype is float32: use auto or bfloat16")
        if self.quantization == "int8" and self.tensor_parallel > 1:
            raise ConfigError(f"quantization is int8, tp is {self.tensor_parallel}: use tp 1")
        self._check_nodes()

    def _check_nodes(self) -> None:
        count = len(self.nodes)
        if not 0 <= self.rank <= max(0, count - 1):
            raise ConfigError(f"rank is {self.rank}: use a value from 0 to {max(0, count - 1)}")
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
    def kv_transport(self) -> str:
        """Name of the KV transport."""
        return self.transport or backends.DEFAULT

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
