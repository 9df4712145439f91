"""Penalties of many rows in one Triton kernel; CUDA only. Triton's interpreter runs it on the CPU.

A program computes _WIDTH logits of one row:

    logits[row] ▶ repetition ▶ frequency ▶ presence ▶ work[i]
    seen[slot] ───────┴────────────┴───────────┘
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tasuki.execution.penalty_torch import IN_PROMPT, LEAST, MOST

_WIDTH = 4096


@triton.jit  # type: ignore[untyped-decorator]
def _penalize(  # type: ignore[no-untyped-def]
    logits, stride, seen, table, count, work, vocab,
    in_prompt: tl.constexpr, least: tl.constexpr, most: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0)
    row = tl.load(table + index).to(tl.int64)
    slot = tl.load(table + count + index).to(tl.int64)
    at = tl.program_id(1) * width + tl.arange(0, width)
    inside = at < vocab
    x = tl.load(logits + row * stride + at, mask=inside)
    if slot >= 0:
        repetition = tl.load(table + 2 * count + index).to(tl.float32)
        frequency = tl.load(table + 3 * count + index).to(tl.float32)
        presence = tl.load(table + 4 * count + index).to(tl.float32)
        held = tl.load(seen + slot * vocab + at, mask=inside)
        if repetition != 1.0:
            scaled = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
            scaled = tl.minimum(tl.maximum(scaled, least), most)
            x = tl.where(held != 0, scaled, x)
        times = (held & (in_prompt - 1)).to(tl.float32)
        x -= times * frequency
        x -= tl.where(times > 0, presence, 0.0)
    tl.store(work + index.to(tl.int64) * vocab + at, x, mask=inside)


def penalize(logits: torch.Tensor, seen: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """As `penalty_torch.penalize`."""
    count, vocab = table.shape[1], logits.shape[1]
    work = torch.empty(count, vocab, dtype=torch.float32, device=logits.device)
    _penalize[count, triton.cdiv(vocab, _WIDTH)](
        logits,
        logits.stride(0),
        seen,
        table,
        count,
        work,
        vocab,
        in_prompt=IN_PROMPT,
        least=LEAST,
        most=MOST,
        width=_WIDTH,
        num_warps=8,
    )
    return work
