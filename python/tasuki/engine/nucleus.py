"""Where top-k and top-p cut a distribution, in Triton; CUDA only.

A sort of a whole vocabulary costs a GPU more than the rest of sampling. Only
the border is wanted: the least logit that is let through. Logits are scaled so
that the largest is 0; the bits of -logit are then integers in the same order,
and the border is found among them by trying eight at a time: 11 passes over one
row, which stays in the cache. One program a row, so a row's border does not
depend on its batch. Triton's interpreter runs it on the CPU (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_WIDTH = 2048  # logits of a row that are looked at together
_INFINITY: tl.constexpr = tl.constexpr(0x7F800000)  # float32's, as an integer
_WAYS = 8  # bounds that one pass tries


@triton.jit  # type: ignore[untyped-decorator]
def _bounds(low, limit, ways: tl.constexpr):  # type: ignore[no-untyped-def]
    """Divide [low, limit] into `ways` parts: the last of each, the limit itself last of all."""
    part = tl.arange(0, ways) + 1
    return low + (limit - low) // ways * part + (limit - low) % ways * part // ways


@triton.jit  # type: ignore[untyped-decorator]
def _within(row, vocab, bounds, ways: tl.constexpr, width: tl.constexpr):  # type: ignore[no-untyped-def]
    """How many logits are not below each of the bounds, and their weight."""
    count = tl.zeros((ways, width), tl.int32)
    weight = tl.zeros((ways, width), tl.float64)
    for begin in range(0, vocab, width):
        at = begin + tl.arange(0, width)
        below = tl.abs(tl.load(row + at, mask=at < vocab, other=float("-inf")))
        own = tl.where(at < vocab, tl.exp(-below), 0.0)[None, :]
        inside = below.to(tl.int32, bitcast=True)[None, :] <= bounds[:, None]
        count += (inside & (at < vocab)[None, :]).to(tl.int32)
        weight += tl.where(inside, own, 0.0).to(tl.float64)
    return tl.sum(count, axis=1), tl.sum(weight, axis=1)


@triton.jit  # type: ignore[untyped-decorator]
def _floors(  # type: ignore[no-untyped-def]
    scaled, stride, top_k, top_p, floors, vocab, ways: tl.constexpr, width: tl.constexpr
):
    index = tl.program_id(0).to(tl.int64)
    row = scaled + index * stride
    k = tl.load(top_k + index)
    p = tl.load(top_p + index)
    limit = k - k + _INFINITY
    if k > 0:
        low = k - k
        while low < limit:
            bounds = _bounds(low, limit, ways)
            count, _weight = _within(row, vocab, bounds, ways, width)
            enough = count >= k
            low = tl.max(tl.where(enough, low, bounds + 1), axis=0)
            limit = tl.min(tl.where(enough, bounds, limit), axis=0)
    if p < 1.0:
        # Of several that are the k-th, as many count as make up k.
        last = tl.zeros((ways,), tl.int32) + (limit - 1)
        counts, totals = _within(row, vocab, last, ways, width)
        count, total = tl.max(counts, axis=0), tl.max(totals, axis=0)
        if k > 0:
            border = tl.exp(-limit.to(tl.float32, bitcast=True)).to(tl.float64)
            total += border * (k - count).to(tl.float64)
        low = k - k
        while low < limit:
            bounds = _bounds(low, limit, ways)
            _count, weight = _within(row, vocab, bounds, ways, width)
            enough = weight >= total * p
            low = tl.max(tl.where(enough, low, bounds + 1), axis=0)
            limit = tl.min(tl.where(enough, bounds, limit), axis=0)
    tl.store(floors + index, -limit.to(tl.float32, bitcast=True))


def nucleus_floors(scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The least scaled logit that top-k, then top-p over what it leaves, let through.

    Args:
        scaled: [n, V] float32, rows contiguous, the largest of each 0.
        top_k: [n] int32; 0: no limit. Larger than V is V.
        top_p: [n] float64; 1 or more: no limit.

    Returns:
        [n] float32.
    """
    rows, vocab = scaled.shape
    assert scaled.stride(1) == 1
    floors = torch.empty(rows, dtype=torch.float32, device=scaled.device)
    width = min(_WIDTH, triton.next_power_of_2(vocab))
    _floors[(rows,)](
        scaled,
        scaled.stride(0),
        top_k.clamp(max=vocab),
        top_p,
        floors,
        vocab,
        ways=_WAYS,
        width=width,
        num_warps=min(max(width // 128, 1), 16),
    )
    return floors
