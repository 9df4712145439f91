"""Which of the native CPU kernels run: the quickest that the processor has, or a named one.

`TASUKI_CPU_KERNELS` names one of `portable`, `neon`, `avx2`, `avx512`, `avx512_bf16` and
`amx_bf16` (crates/cpu, simd/instance.rs), to compare them or to test one on a newer processor.
"""

from __future__ import annotations

import os

from tasuki import _native
from tasuki.models.errors import ModelError

VARIABLE = "TASUKI_CPU_KERNELS"

_ROUND_ACTIVATIONS = ("avx512_bf16", "amx_bf16")  # to bfloat16, which they multiply in pairs


def available() -> list[str]:
    """Names of the kernels that this processor runs, the quickest last."""
    return [name for name, missing in _native.cpu_kernels() if not missing]


def choose(*, int8: bool = False) -> str:
    """The kernels to run: for int8 weights those that widen, the others would round activations.

    Raises:
        ModelError: `TASUKI_CPU_KERNELS` names none, or one that this processor cannot run.
    """
    known = dict(_native.cpu_kernels())
    wanted = os.environ.get(VARIABLE, "")
    if not wanted:
        return [name for name in available() if not (int8 and name in _ROUND_ACTIVATIONS)][-1]
    if wanted not in known:
        raise ModelError(f"{VARIABLE} is {wanted!r}: use one of {', '.join(known)}")
    if known[wanted]:
        lacking = ", ".join(known[wanted])
        runs = ", ".join(available())
        raise ModelError(
            f"{VARIABLE} is {wanted!r}, this processor has no {lacking}: use one of {runs}"
        )
    return wanted
