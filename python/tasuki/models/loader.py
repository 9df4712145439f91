"""From a Hugging Face folder to a model that runs, and the dtype to run it in."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from tasuki.execution.collective import ALONE, Collective
from tasuki.models.base import CausalModel
from tasuki.models.checkpoint import Checkpoint
from tasuki.models.dummy import DummyTensors
from tasuki.models.errors import ModelError, UnsupportedModelError
from tasuki.models.layers import Linear, make_linear
from tasuki.models.llama import LlamaModel, prepare
from tasuki.models.llama_cpu import CpuLlamaModel, make_native_linear, why_not
from tasuki.models.llama_tensors import has_tied_head, read_llama, require_llama
from tasuki.models.shard import Shard, check_ranks
from tasuki.models.spec import ModelSpec
from tasuki.models.spec_reader import read_spec
from tasuki.models.weights import Source, Tensors

log = logging.getLogger(__name__)

# choose_dtype: rows of its GEMMs, and bytes of float32 weights that one pass reads.
_TRIAL_ROWS = (1, 8, 256)
_TRIAL_BYTES = 96e6
_TRIAL_REPEATS = 3
_WORTH = 1.1  # bfloat16 must be this much faster: float32 is exact

WEIGHTS = ("auto", "dummy")
QUANTIZATIONS = ("none", "int8", "fp8")
_LEAST_POSITIONS = 4_096  # of the rotation's table, for steps that are only measured


def load_model(
    path: Path | str,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    trust_remote_code: bool = False,
    weights: str = "auto",
    quantization: str = "none",
    kv_dtype: torch.dtype | None = None,
    collective: Collective = ALONE,
    longest: int | None = None,
) -> CausalModel:
    """Load a model: on the fast path if its family has one, else through transformers.

    Args:
        path: Hugging Face folder with safetensors.
        dtype: Of weights, activations and cache.
        device: Where the weights go.
        trust_remote_code: Whether code that comes with the folder may run.
        weights: One of WEIGHTS: "auto" reads the folder's; "dummy" makes random
            ones of the config's shape on the device, for benchmarks.
        quantization: One of QUANTIZATIONS, how the weights of GEMMs are rounded: `int8`, which
            requires that the native CPU kernels run the model in bfloat16, or `fp8`, in blocks
            of 128 x 128. Weights that are fp8 in the folder stay so.
        kv_dtype: Of the cache; None: `dtype`.
        collective: Joins the ranks that the model is divided among; each loads its part.
        longest: Tokens of the longest sequence that will run; None: the model's context.
            Memory for rotations is bounded by it.

    Raises:
        ModelError: The folder is not complete, or its weights do not fit its config,
            or `weights` or `quantization` is not one of those.
        UnsupportedModelError: Neither path runs this model; says why. Or it cannot be
            divided among the ranks, or not be quantized.
    """
    for name, value, known in (
        ("weights", weights, WEIGHTS),
        ("quantization", quantization, QUANTIZATIONS),
    ):
        if value not in known:
            raise ModelError(f"{name} is {value!r}, must be one of {', '.join(known)}")
    folder, device = Path(path), torch.device(device)
    dummy = weights == "dummy"
    spec = read_spec(folder, trust_remote_code=trust_remote_code)
    check_ranks(spec, collective.size)
    int8 = quantization == "int8"
    if int8:
        _require_int8(spec, _why_not_own_kernels(spec, dtype, device, collective, kv_dtype))
    if quantization == "fp8":
        _require_fp8(spec)
    if not spec.native:
        from tasuki.models.fallback import load_fallback

        return load_fallback(
            folder, spec, dtype, device, trust_remote_code=trust_remote_code, dummy=dummy
        )
    if longest is not None:
        spec = replace(spec, max_position=min(spec.max_position, max(longest, _LEAST_POSITIONS)))
    with torch.inference_mode():
        tensors: Tensors
        if dummy:
            tensors = DummyTensors(dtype, device)
        else:
            tensors = checkpoint = Checkpoint(folder, dtype, device)
            require_llama(spec, checkpoint)
            spec = replace(spec, tied_head=has_tied_head(spec, checkpoint))
        shard = Shard(spec, collective.rank, collective.size)
        read = read_llama(shard, Source(tensors, quantized=quantization == "fp8"))
        reason = _why_not_own_kernels(spec, dtype, device, collective, kv_dtype)
        if reason is None:
            native = CpuLlamaModel(spec, read, int8=int8)
            kept = ", int8 weights" if int8 else ""
            log.info("kernels: Tasuki's own for the CPU, %s%s", native.kernels, kept)
            return native
        if device.type == "cpu":
            log.info("kernels: PyTorch's; Tasuki's own for the CPU do not serve: %s", reason)
        return LlamaModel(shard.local, prepare(spec, read, collective))


def _require_int8(spec: ModelSpec, reason: str | None) -> None:
    if not spec.native:
        reason = f"{spec.architecture} runs through transformers"
    if reason is not None:
        raise UnsupportedModelError(
            f"int8 weights require the Llama family in bfloat16 on the CPU, in one rank: {reason};"
            " leave out --quantization"
        )


def _require_fp8(spec: ModelSpec) -> None:
    reason = None
    if not spec.native:
        reason = f"{spec.architecture} runs through transformers"
    elif spec.experts is not None:
        reason = "the model has experts"
    if reason is not None:
        raise UnsupportedModelError(
            f"fp8 weights require the Llama family without experts: {reason}; leave out"
            " --quantization"
        )


def _why_not_own_kernels(
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    collective: Collective,
    kv_dtype: torch.dtype | None,
) -> str | None:
    if kv_dtype not in (None, dtype):
        return f"the KV cache is {str(kv_dtype).removeprefix('torch.')}"
    if collective.size > 1:
        return f"the model is divided among {collective.size} ranks"
    return why_not(spec, dtype, device)


def compile_model(model: CausalModel) -> bool:
    """Let torch compile a model that runs through transformers.

    Returns:
        Whether it could; if not, the log says why.
    """
    from tasuki.models.fallback import FallbackModel
    from tasuki.models.fallback_compile import compile_layers

    assert isinstance(model, FallbackModel)
    if model.spec.states:
        log.warning(
            "%s runs without torch.compile, slower: its layers keep states", model.spec.architecture
        )
        return False
    return compile_layers(model)


def choose_dtype(spec: ModelSpec, device: torch.device | str) -> tuple[torch.dtype, str]:
    """Measure whether float32 or bfloat16 is faster on this machine, for this model.

    Times GEMMs of the model's shapes, by the kernels that it would run by, at
    rows like those of decoding (1, 8) and of prefill (256), on one thread and in
    processor time, so that what else runs on the machine matters little: a fraction
    of a second.

    Returns:
        The dtype, and the reason in one line.
    """
    device = torch.device(device)
    if device.type != "cpu":
        return torch.bfloat16, f"bfloat16: the default on {device.type}"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        full, half = (_trial(spec, dtype) for dtype in (torch.float32, torch.bfloat16))
    finally:
        torch.set_num_threads(threads)
    gains = [a / b for a, b in zip(full, half, strict=True)]
    measured = ", ".join(
        f"{gain:.1f}x at {rows}" for gain, rows in zip(gains, _TRIAL_ROWS, strict=True)
    )
    faster = statistics.median(gains) >= _WORTH
    name = "bfloat16" if faster else "float32"
    return (
        torch.bfloat16 if faster else torch.float32,
        f"{name}: bfloat16 measured {measured} rows the speed of float32 here",
    )


def _trial(spec: ModelSpec, dtype: torch.dtype) -> list[float]:
    """Seconds of one pass over some layers' MLP GEMMs, for each of _TRIAL_ROWS."""
    inner, hidden = 2 * spec.intermediate_size, spec.hidden_size
    copies = max(1, min(spec.num_layers, int(_TRIAL_BYTES / (4 * inner * hidden))))
    with torch.inference_mode():
        make: Callable[[torch.Tensor], Linear] = make_linear
        if spec.native and why_not(spec, dtype, torch.device("cpu")) is None:
            make = make_native_linear
        gemms = [make(torch.full((inner, hidden), 0.01, dtype=dtype)) for _ in range(copies)]
        result = []
        for rows in _TRIAL_ROWS:
            x = torch.full((rows, hidden), 0.01, dtype=dtype)
            used = gemms if rows < 32 else gemms[: max(1, copies // 8)]
            times = []
            for _ in range(_TRIAL_REPEATS + 1):
                begin = time.thread_time()
                for gemm in used:
                    gemm(x)
                times.append(time.thread_time() - begin)
            result.append(min(times[1:]))
    return result


__all__ = ["QUANTIZATIONS", "WEIGHTS", "ModelError", "choose_dtype", "compile_model", "load_model"]
