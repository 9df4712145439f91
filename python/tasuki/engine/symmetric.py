"""Sums of small tensors over ranks by reading each other's memory: torch's symmetric memory.

One kernel copies a rank's part into memory that all ranks have mapped, waits for
the others' parts and adds them up, in the same order on every rank. NCCL takes
longer to begin than such a message takes to arrive. A CUDA graph may hold it.

Source: torch.distributed._symmetric_memory and torch.ops.symm_mem, torch 2.11.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

# Every rank reads all of every other rank's part: beyond this NCCL's way is shorter.
MAX_BYTES = 1 << 20
_ALIGN_BYTES = 16  # of what one thread reads; less divisible messages are read in smaller pieces
_DTYPES = (torch.bfloat16, torch.float32)


class SymmetricSum:
    """The sum over ranks of whatever `takes` it.

    Args:
        device: This rank's.
        max_bytes: Of the largest message.
    """

    def __init__(self, device: torch.device, max_bytes: int = MAX_BYTES) -> None:
        import torch.distributed._symmetric_memory as symmetric

        self._max_bytes = max_bytes
        self._group = dist.group.WORLD.group_name  # type: ignore[union-attr]
        self._buffers: dict[torch.dtype, Any] = {}
        for dtype in _DTYPES:
            buffer = symmetric.empty(max_bytes // dtype.itemsize, dtype=dtype, device=device)
            symmetric.rendezvous(buffer, self._group)
            self._buffers[dtype] = buffer

    def takes(self, x: torch.Tensor) -> bool:
        """Whether this is a way for `x`: the same on every rank."""
        size_bytes = x.numel() * x.itemsize
        return (
            x.dtype in self._buffers
            and 0 < size_bytes <= self._max_bytes
            and size_bytes % _ALIGN_BYTES == 0
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """A new tensor: the sum of all ranks' `x`."""
        buffer = self._buffers[x.dtype][: x.numel()]
        total = torch.ops.symm_mem.one_shot_all_reduce_copy(
            buffer, x.contiguous().view(-1), "sum", self._group
        )
        return total.view(x.shape)  # type: ignore[no-any-return]


def make_symmetric_sum(device: torch.device) -> tuple[SymmetricSum | None, str]:
    """A sum that has proved itself on every rank; None where it does not work.

    Returns:
        It, and the choice in one line for the log.
    """
    reason = ""
    found = None
    try:
        found = SymmetricSum(device)
        ours = torch.arange(64, dtype=torch.float32, device=device) + dist.get_rank()
        size = dist.get_world_size()
        want = size * torch.arange(64, dtype=torch.float32, device=device) + math.comb(size, 2)
        if not torch.equal(found(ours), want):
            reason = "its sum is wrong"
    except (RuntimeError, ImportError, AttributeError) as error:
        reason = str(error).partition("\n")[0]
    if not agreed(not reason, device):
        return None, f"NCCL; symmetric memory does not work here: {reason or 'on another rank'}"
    return found, f"symmetric memory up to {MAX_BYTES >> 10} KiB, NCCL beyond"


def agreed(works: bool, device: torch.device) -> bool:
    """Whether something works on every rank."""
    all_work = torch.tensor([int(works)], device=device)
    dist.all_reduce(all_work, op=dist.ReduceOp.MIN)
    return bool(all_work.item())
