"""Kernels that begin while the one before them ends: programmatic dependent launch.

Such a kernel waits (`gdc_wait`) before it touches memory, and lets the next one begin
(`gdc_launch_dependents`) when it has only its ends to write: what a launch costs is then
paid while the kernel before it still runs, in CUDA graphs too. Every kernel launched so
waits for all before it, so it does not matter which of its neighbours know of this.
While it waits it may prefetch what no kernel before it writes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tasuki.device_limits import limits_of

_FIRST_CAPABILITY = (9, 0)


def overlaps(device: torch.device) -> bool:
    """Whether kernels can be launched so on this device."""
    return limits_of(device).capability >= _FIRST_CAPABILITY


@triton.jit
def prefetch(address, size):  # type: ignore[no-untyped-def]
    """Prefetch memory to the second-level cache: from Hopper on.

    Args:
        address: Of the first byte, a multiple of 16: int64, one for each thread.
        size: In bytes, a multiple of 16; 0: nothing.
    """
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $2, 0;"
        " @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r",
        [address, size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
