"""The Rust extension (crates/py)."""

import numpy as np
from numpy.typing import NDArray

_Bits = NDArray[np.int16]

__version__: str
HAS_TLS: bool  # the feature `tls`
HAS_OTEL: bool  # the feature `otel`
STEP_SHARE: float
"""Of the time that a token may take, what a step with prompts in it may (crates/plan)."""

def run_router(args: list[str]) -> int:
    """Run the router's command line (without the program's name); gives its exit code."""

def run_simulate(args: list[str]) -> int:
    """Run `tasuki simulate` with these arguments; gives the exit code."""

def run_plan(args: list[str]) -> int:
    """Run `tasuki plan` with these arguments; gives the exit code."""

def plan_quietly(args: list[str]) -> tuple[str, str]:
    """The plan for the arguments of `tasuki plan`: as JSON, and as it is printed.

    Raises ValueError with what `tasuki plan` would say.
    """

def run_bench(args: list[str]) -> int:
    """Run a command of the load generator (its name comes first); gives its exit code."""

def block_hashes(
    identity: bytes, tenant: str, block_size_tokens: int, tokens: list[int]
) -> list[bytes]:
    """Hash all full blocks of `tokens`, in order, 16 bytes each (crates/core, block_hash.rs)."""

def greedy(logits: NDArray[np.float32], width: int, tokens: NDArray[np.int64], none: int) -> None:
    """Likeliest token of each row of `width` logits to `tokens`; `none` where not finite."""

class StepFit:
    """What steps that decode take on one worker (crates/core, cost/step_fit.rs)."""

    def __init__(self) -> None: ...
    def learn(
        self, sequences: int, kv_tokens: int, prompt_tokens: int, duration_s: float
    ) -> None: ...
    def decode_s(self, sequences: int, kv_tokens: int) -> float: ...
    def prompt_token_s(self) -> float: ...

class ChunkFit:
    """What a chunk of prompts adds to a step that decodes (crates/core, cost/step_fit.rs)."""

    def __init__(self) -> None: ...
    def learn(
        self, prompt_tokens: int, prompt_squares: float, step_s: float, decode_s: float
    ) -> None: ...
    def overhead_tokens(self) -> float: ...

class CpuShape:
    """The shape of a Llama-family model; `windows` has an entry for each layer."""

    def __init__(
        self,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        hidden: int,
        intermediate: int,
        vocab: int,
        norm_eps: float,
        windows: list[int | None],
    ) -> None: ...
    def why_not(self) -> str | None:
        """Why the kernels cannot run a model of this shape; None: they can."""

def cpu_kernels() -> list[tuple[str, list[str]]]:
    """Name of each set of CPU kernels, the quickest last, and what this processor lacks."""

class CpuModel:
    """A Llama-family model in bfloat16 on the CPU (crates/cpu), its arrays' bits as int16.

    All arrays are contiguous; whatever does not fit raises ValueError.
    """

    def __init__(
        self,
        kernels: str,
        int8: bool,
        shape: CpuShape,
        embedding: _Bits,
        norm: _Bits,
        head: _Bits,
    ) -> None: ...
    def push_layer(
        self,
        *,
        attention_norm: _Bits,
        qkv: _Bits,
        qkv_bias: _Bits | None,
        head_norms: tuple[_Bits, _Bits] | None,
        output: _Bits,
        output_bias: _Bits | None,
        mlp_norm: _Bits,
        gate: _Bits,
        up: _Bits,
        down: _Bits,
    ) -> None:
        """Add the next layer; packed, not kept."""

    def forward(
        self,
        *,
        pool: _Bits,
        block_size: int,
        tokens: NDArray[np.int64],
        positions: NDArray[np.int64],
        slots: NDArray[np.int64],
        tables: NDArray[np.int32],
        query_lens: list[int],
        context_lens: list[int],
        logits_rows: NDArray[np.int64],
        rotations: NDArray[np.float32],
        threads: int,
        logits: NDArray[np.float32],
    ) -> None:
        """Run one step on so many threads; fills `logits` [R, vocab], writes the pool."""

class CpuLinear:
    """One GEMM with a packed bfloat16 weight [outputs, inputs], on the calling thread."""

    def __init__(self, kernels: str, int8: bool, weight: _Bits, inputs: int) -> None: ...
    def run(self, x: _Bits, out: NDArray[np.float32]) -> None:
        """Multiply `x`, [rows, inputs], into `out`, [rows, outputs]."""
