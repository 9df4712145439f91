"""Which of FlashInfer's kernels attend, and compiling those that this machine has not yet.

`flashinfer.py` plans and calls them. These two are the only importers of FlashInfer.
"""

from __future__ import annotations

import logging
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import flashinfer
import torch

from tasuki.device_limits import limits_of

log = logging.getLogger(__name__)

HEAD_DIMS = (64, 128, 256)
VERSIONS = ((0, 6, 14), (0, 7))  # of FlashInfer: from the first on, before the second


@dataclass(frozen=True, slots=True)
class FlashInferOptions:
    """Which of FlashInfer's ways to take; benchmarks/gpu/steps.py measures them.

    Attributes:
        prefill: "fa3" (Hopper), "fa2", or "auto" for the best that the device
            and the dtypes allow.
        ragged: chunks that begin their sequences read keys and values from the
            step, not from the pool.
        joint: decodes of a mixed step go with the chunks in one call.
        workspace_bytes: for partial results of split sequences.
    """

    prefill: str = "auto"
    ragged: bool = True
    joint: bool = False
    workspace_bytes: int = 256 << 20


class Kernels:
    """The kernels for one pool and one model.

    Args:
        pool: Of the KV cache; see flashinfer.py.
        dtype: Of queries, keys and values as the model gives them.
        options: Which ways to take.
    """

    def __init__(self, pool: torch.Tensor, dtype: torch.dtype, options: FlashInferOptions) -> None:
        self._pool, self._dtype, self._options = pool, dtype, options
        self._head_dim = pool.shape[-1]

    def backend(self, kv_dtype: torch.dtype) -> str:
        """As FlashInfer's wrappers name the kernels; on the CPU they are tests'."""
        return self._version_for(kv_dtype) if self._pool.is_cuda else self._options.prefill

    def compile(self, windowed: set[bool]) -> None:
        """Compile what is missing for layers with a window, without one, or both.

        One after another, as FlashInfer does when a kernel is first needed, takes a
        minute or more each. Not by its `build_jit_specs`: that leaves ninja's log where
        loading a kernel does not look for it, and compiles it again.
        """
        dtype, kv_dtypes = self._dtype, [self._pool.dtype]
        if self._options.ragged:
            kv_dtypes.append(dtype)
        specs = {}
        for window in windowed:
            # Positions are not FlashInfer's business (0); no cap on logits, no 16-bit sums.
            shape = (torch.int32, self._head_dim, self._head_dim, 0, window, False)
            for kv_dtype in kv_dtypes:
                spec = flashinfer.jit.gen_batch_prefill_module(
                    self._version_for(kv_dtype), dtype, kv_dtype, dtype, *shape, False
                )
                specs[spec.name] = spec
        missing = [spec for spec in specs.values() if not (spec.is_compiled or spec.is_aot)]
        if missing:
            log.info(
                "FlashInfer: compiling %d of %d kernels; they are kept in its cache",
                len(missing),
                len(specs),
            )
            with ThreadPoolExecutor(len(missing)) as threads:
                list(threads.map(lambda spec: spec.build(verbose=False), missing))

    def _version_for(self, kv_dtype: torch.dtype) -> str:
        """Which kernels attend to keys and values of this dtype: "fa2" or "fa3"."""
        if self._options.prefill != "auto":
            return self._options.prefill
        if self._pool.is_cuda and limits_of(self._pool.device).capability[0] != 9:
            return "fa2"
        chosen: str = flashinfer.utils.determine_attention_backend(
            self._pool.device, 0, False, False, self._dtype, kv_dtype
        )
        return chosen


def why_not(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype
) -> str | None:
    """Why FlashInfer cannot attend for a model of this shape; None: it can."""
    if not VERSIONS[0] <= _version() < VERSIONS[1]:
        first, end = (".".join(map(str, version)) for version in VERSIONS)
        return (
            f"FlashInfer is {flashinfer.__version__}, private parts of it are used that are known"
            f" from {first} to below {end}"
        )
    if dtype not in (torch.bfloat16, torch.float16):
        return f"FlashInfer computes in bfloat16 or float16, the model is in {dtype}"
    if kv_dtype not in (dtype, torch.float8_e4m3fn):
        return f"the KV cache is {kv_dtype}, must be {dtype} or float8_e4m3fn for FlashInfer"
    if head_dim not in HEAD_DIMS:
        return f"head_dim is {head_dim}, FlashInfer has kernels for {HEAD_DIMS}"
    if heads % kv_heads:
        return f"{heads} query heads over {kv_heads} KV heads: must divide"
    return None


def _version() -> tuple[int, ...]:
    """Of FlashInfer; what follows its three numbers does not count."""
    return tuple(int(number) for number in re.findall(r"\d+", flashinfer.__version__)[:3])
