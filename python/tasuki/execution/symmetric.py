"""Sums over ranks by reading each other's memory: torch's symmetric memory.

A rank's part lies in memory that all ranks have mapped, and one kernel waits for the
others' parts and adds them up, in the same order on every rank:

    one shot     every rank reads all of every other's part and keeps the sum
    two shots    every rank sums a stretch and writes it to all, in place

NCCL takes longer, as far as measured. A CUDA graph may hold either kernel. Both end
when all ranks have read what they read, so what a rank does next with its memory
disturbs nobody.

Source: torch.distributed._symmetric_memory and torch.ops.symm_mem, torch 2.11.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

# In a CUDA graph, us for [rows, 2560] in bfloat16 on H200s, parts in place
# (benchmarks/gpu/tensor_parallel.py):
#
#     rows                   1     16     96    256  2,048
#     2 ranks, one shot    6.0    7.2    9.7   14.2   62.9
#              two shots   6.1    7.1    7.6   10.5   38.7
#              NCCL       19.9   19.1   24.6   26.7   63.2
#     4 ranks, one shot    6.5    8.0   12.9   20.7  106.7
#              two shots   6.4    8.7    9.5   14.4   59.9
#              NCCL       23.9   25.4   28.2   31.3   83.0
#
# Of more ranks there is no measurement: there one shot reads more, two shots hardly.
_ONE_SHOT_BYTES = ((2, 64 << 10), (4, 128 << 10), (math.inf, 16 << 10))  # up to so many ranks
MAX_BYTES = 10 << 20  # as far as measured
_ALIGN_BYTES = 16  # of what one thread reads; less divisible messages are read in smaller pieces
_DTYPES = (torch.bfloat16, torch.float32)
_ops: Any = torch.ops.symm_mem


class SymmetricSum:
    """The sum over ranks of whatever `takes` it.

    Args:
        device: This rank's.

    Attributes:
        one_shot_bytes: Of the largest message that is summed in one shot.
    """

    def __init__(self, device: torch.device) -> None:
        import torch.distributed._symmetric_memory as symmetric

        size = dist.get_world_size()
        self.one_shot_bytes = next(most for ranks, most in _ONE_SHOT_BYTES if size <= ranks)
        self._group = dist.group.WORLD.group_name  # type: ignore[union-attr]
        self._buffers: dict[torch.dtype, Any] = {}
        for dtype in _DTYPES:
            buffer = symmetric.empty(MAX_BYTES // dtype.itemsize, dtype=dtype, device=device)
            symmetric.rendezvous(buffer, self._group)
            self._buffers[dtype] = buffer

    def takes(self, x: torch.Tensor) -> bool:
        """Whether this is a way for `x`: the same on every rank."""
        return self._fits(x.numel(), x.dtype)

    def place(self, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor | None:
        """See `Collective.place`."""
        if not self._fits(rows * width, dtype):
            return None
        return self._buffers[dtype][: rows * width].view(rows, width)  # type: ignore[no-any-return]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' `x`, wherever each lies; valid until the next sum."""
        buffer = self._buffers[x.dtype][: x.numel()]
        placed = x.data_ptr() == buffer.data_ptr()
        if x.numel() * x.itemsize > self.one_shot_bytes:
            if not placed:
                buffer.copy_(x.reshape(-1))
            total = _ops.two_shot_all_reduce_(buffer, "sum", self._group)
        elif placed:
            total = _ops.one_shot_all_reduce(buffer, "sum", self._group)
        else:
            flat = x.contiguous().view(-1)
            total = _ops.one_shot_all_reduce_copy(buffer, flat, "sum", self._group)
        return total.view(x.shape)  # type: ignore[no-any-return]

    def _fits(self, numel: int, dtype: torch.dtype) -> bool:
        size_bytes = numel * dtype.itemsize
        return (
            dtype in self._buffers
            and 0 < size_bytes <= MAX_BYTES
            and size_bytes % _ALIGN_BYTES == 0
        )


def make_symmetric_sum(device: torch.device) -> tuple[SymmetricSum | None, str]:
    """A sum that was tried on every rank and is right; None where it does not work.

    Returns:
        It, and the choice in one line for the log.
    """
    reason = ""
    found = None
    try:
        found = SymmetricSum(device)
        if not adds_up(found, device):
            reason = "its sum is wrong"
    except (RuntimeError, ImportError, AttributeError) as error:
        reason = str(error).partition("\n")[0]
    if not agreed(not reason, device):
        return None, f"NCCL; symmetric memory does not work here: {reason or 'on another rank'}"
    return found, f"symmetric memory up to {MAX_BYTES >> 10} KiB, NCCL beyond"


def adds_up(sums: SymmetricSum, device: torch.device) -> bool:
    """Whether sums are right on this rank, in one shot and in two, in place and not."""
    size, right = dist.get_world_size(), True
    for numel in (64, 64 + sums.one_shot_bytes // torch.float32.itemsize):
        ours = torch.arange(numel, dtype=torch.float32, device=device) + dist.get_rank()
        want = size * torch.arange(numel, dtype=torch.float32, device=device) + math.comb(size, 2)
        right &= torch.equal(sums(ours), want)
        place = sums.place(1, numel, torch.float32)
        assert place is not None
        right &= torch.equal(sums(place.copy_(ours))[0], want)
    return right


def agreed(works: bool, device: torch.device) -> bool:
    """Whether something works on every rank."""
    all_work = torch.tensor([int(works)], device=device)
    dist.all_reduce(all_work, op=dist.ReduceOp.MIN)
    return bool(all_work.item())
