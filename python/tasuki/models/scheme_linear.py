"""The GEMM by a weight of any scheme, as fast as the device does it."""

from __future__ import annotations

import functools
import logging

import torch

from tasuki.models.layers import Linear, make_linear
from tasuki.models.weights import Fp8Weight, Weight

log = logging.getLogger(__name__)


def linear_of(weight: Weight, bias: torch.Tensor | None = None) -> Linear:
    """The GEMM by `weight`; `bias` is [out]. Of fp8 where the device's kernels read it so."""
    if isinstance(weight, Fp8Weight) and weight.values.is_cuda:
        from tasuki.models.fp8_linear import Fp8Linear, why_not  # imports Triton

        reason = why_not(weight)
        if reason is None:
            return Fp8Linear(weight, bias)
        _say_dense(reason, weight.dtype)
    return make_linear(weight.dense(), bias)


@functools.cache
def _say_dense(reason: str, dtype: torch.dtype) -> None:
    log.warning("some fp8 weights are kept in %s: %s", str(dtype).removeprefix("torch."), reason)
