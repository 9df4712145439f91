"""Penalties of many rows by PyTorch's operators, for the CPU; penalty_kernel.py is for GPUs."""

from __future__ import annotations

import torch

# Finite bounds, so that no difference of two logits is NaN.
LEAST, MOST = torch.finfo(torch.float32).min, torch.finfo(torch.float32).max

IN_PROMPT = 1 << 30
"""Bit of `seen` that says that a token is in the prompt; the bits below count it in the output."""


def penalize(logits: torch.Tensor, seen: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Copies of rows of logits, penalized.

    Args:
        logits: [R, V] float32, adjacent in a row; not changed.
        seen: [slots, V] int32: which tokens sequences hold; see `IN_PROMPT`.
        table: [5, n] float64: row of `logits`; row of `seen`, -1 for no penalties;
            repetition, frequency and presence penalty.

    Returns:
        [n, V] float32, contiguous.
    """
    work = logits[table[0].long()]
    chosen = (table[1] >= 0).nonzero()[:, 0]
    if len(chosen):
        repetition, frequency, presence = table[2:, chosen, None].float()
        rows, held = work[chosen], seen[table[1, chosen].long()]
        scaled = torch.where(rows > 0, rows / repetition, rows * repetition).clamp_(LEAST, MOST)
        rows = torch.where((held != 0) & (repetition != 1.0), scaled, rows)
        counts = (held & (IN_PROMPT - 1)).float()
        work[chosen] = rows.sub_(counts * frequency).sub_((counts > 0) * presence)
    return work
