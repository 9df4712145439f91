"""A sum over ranks, its addition to the residual and the norm after it: FlashInfer's one kernel.

Every rank writes its part to all others and reads what came until all of it has;
nobody waits for a barrier, and what was summed never goes to memory in between.

Source: flashinfer.comm.allreduce_fusion, FlashInfer 0.6.14.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tasuki.engine.symmetric import agreed

MAX_ROWS = 2048  # of a step that it takes


class FusedSum:
    """`hidden += sum of x over ranks`, and the norm of that.

    Args:
        width: Of a row.
        dtype: Of the rows.
    """

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        from flashinfer.comm import (
            AllReduceFusionPattern,
            TRTLLMAllReduceFusionWorkspace,
            allreduce_fusion,
        )

        self._run: Any = allreduce_fusion
        self._pattern = AllReduceFusionPattern.kARResidualRMSNorm
        self._workspace = TRTLLMAllReduceFusionWorkspace(
            dist.get_world_size(), dist.get_rank(), MAX_ROWS, width, dtype
        )

    def takes(self, rows: int) -> bool:
        """See `SumNorm`."""
        return 0 < rows <= MAX_ROWS

    def __call__(
        self, hidden: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """See `SumNorm`."""
        normed = torch.empty_like(hidden)
        self._run(
            x,
            self._workspace,
            self._pattern,
            residual_in=hidden,
            residual_out=hidden,
            norm_out=normed,
            rms_gamma=weight,
            rms_eps=eps,
            use_oneshot=True,
            fp32_acc=True,
        )
        return normed


def make_fused_sum(
    width: int, dtype: torch.dtype, device: torch.device
) -> tuple[FusedSum | None, str]:
    """One that has proved itself on every rank; None where it does not work.

    Returns:
        It, and the choice in one line for the log.
    """
    found, reason = None, ""
    try:
        found = FusedSum(width, dtype)
        size = dist.get_world_size()
        x = torch.full((3, width), 1.0 + dist.get_rank(), dtype=dtype, device=device)
        hidden = torch.ones_like(x)
        normed = found(hidden, x, torch.full_like(x[0], 2.0), 1e-6)
        want = 1.0 + size * (size + 1) / 2
        if not (hidden == want).all() or (normed.float() - 2.0).abs().max() > 0.02:
            reason = "its result is wrong"
    except Exception as error:
        reason = f"{error!r}".partition("\n")[0]
    if not agreed(not reason, device):
        return None, f"sums apart from norms: {reason or 'so on another rank'}"
    return found, f"sums together with norms by FlashInfer, up to {MAX_ROWS} rows"
