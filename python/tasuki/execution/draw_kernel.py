"""One token for each row of logits, in one Triton kernel; CUDA only.

Temperature, top-k, top-p, min-p and the inverse of the cumulative distribution in
vocabulary order. One program draws for one row, so a token does not depend on its batch:

    largest logit ▶ border of top-k ▶ border of top-p ▶ min-p ▶ total ▶ tile ▶ token

A logit's *distance* is (largest - logit) / temperature, in float32. The bits of a distance,
which is not negative, are an integer in the same order: its *key*. A filter lets through all
keys up to a border, ties included. The border is found by summing the weights, exp(-distance),
below a few bounds at a time. After two passes over the row only the logits between two
bounds are left in question; they are copied and searched alone.

Weights are fixed-point integers. Their sums are exact in every order, so the borders and the
token are functions of the row and nothing else. The largest weight is 2^bits, where
`vocab << bits` fits 62 bits: 2^44 for up to 262,144 tokens.

Triton's interpreter runs it on the CPU (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_WIDTH = 4096  # logits of a row that are loaded together
_LANES = 2048  # columns of the copy
_STAGES = 4  # tiles on their way from memory
_WAYS = 4  # bounds that one pass tries
_PASSES = 2  # over a whole row, before the rest is copied

_INFINITY: tl.constexpr = tl.constexpr(0x7F800000)  # float32's, as an integer
_FURTHEST: tl.constexpr = tl.constexpr(200.0)  # weights at this distance are 0
_LOG2E: tl.constexpr = tl.constexpr(1.4426950216293335)  # log2(e), rounded to float32
_LOG2E_REST: tl.constexpr = tl.constexpr(1.9259629911266175e-8)  # what the rounding took
_LN2: tl.constexpr = tl.constexpr(0.6931471805599453)

FIELDS = ("row", "adjusted", "temperature", "top_k", "top_p", "furthest", "uniform")
"""Rows of `draw`'s parameters."""


@triton.jit
def _keys(row, at, length, most, inverse):  # type: ignore[no-untyped-def]
    """Keys of logits; infinity beyond the row."""
    logit = tl.load(row + at, mask=at < length, other=float("-inf"))
    return ((most - logit) * inverse).to(tl.int32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def _weights(keys, bits: tl.constexpr):  # type: ignore[no-untyped-def]
    """exp(-distance), fixed-point int64.

    The product with log2(e) is taken in two parts: alone its rounding would cost more than
    exp2's. Every fused operation is written out, so that all passes see the same weights.
    """
    distance = tl.minimum(keys.to(tl.float32, bitcast=True), _FURTHEST)
    high = distance * _LOG2E
    low = tl.fma(distance, _LOG2E_REST, tl.fma(distance, _LOG2E, -high))
    return (tl.exp2(-high) * tl.fma(low, -_LN2, 1.0) * 2.0**bits).to(tl.int64)


@triton.jit  # type: ignore[untyped-decorator]
def _below(  # type: ignore[no-untyped-def]
    row, length, most, inverse, bounds,
    counted: tl.constexpr, ways: tl.constexpr, bits: tl.constexpr,
    width: tl.constexpr, stages: tl.constexpr,
):  # fmt: skip
    """How many keys are not above each of the bounds (`counted`), or their weight: [ways] int64."""
    sums = tl.zeros((ways, width), tl.int64)
    for begin in tl.range(0, length, width, num_stages=stages):
        keys = _keys(row, begin + tl.arange(0, width), length, most, inverse)
        own = tl.full((width,), 1, tl.int64) if counted else _weights(keys, bits)
        sums += tl.where(keys[None, :] <= bounds[:, None], own[None, :], 0)
    return tl.sum(sums, axis=1)


@triton.jit  # type: ignore[untyped-decorator]
def _bounds(low, limit, ways: tl.constexpr):  # type: ignore[no-untyped-def]
    """Keys that divide [low, limit] into ways + 1 parts, all below `limit`."""
    part = tl.arange(0, ways) + 1
    return (
        low + (limit - low) // (ways + 1) * part + (limit - low) % (ways + 1) * part // (ways + 1)
    )


@triton.jit
def _narrow(low, limit, before, bounds, sums, target):  # type: ignore[no-untyped-def]
    """The part of [low, limit] between the bounds whose sums lie around the target."""
    less = sums < target
    low = tl.maximum(low, tl.max(tl.where(less, bounds + 1, 0), axis=0))
    limit = tl.minimum(limit, tl.min(tl.where(less, _INFINITY, bounds), axis=0))
    return low, limit, tl.maximum(before, tl.max(tl.where(less, sums, 0), axis=0))


@triton.jit  # type: ignore[untyped-decorator]
def _copy_between(  # type: ignore[no-untyped-def]
    row, length, most, inverse, low, limit, copy, lanes: tl.constexpr, stages: tl.constexpr
):
    """Copy the logits whose keys are in [low, limit]; the rest of the copy is -infinity.

    Each lane appends to a column of its own, so that no lane waits for another.

    Returns:
        The length of the copy.
    """
    lane = tl.arange(0, lanes)
    filled = tl.zeros((lanes,), tl.int32)
    for begin in tl.range(0, length, lanes, num_stages=stages):
        at = begin + lane
        logit = tl.load(row + at, mask=at < length, other=float("-inf"))
        keys = ((most - logit) * inverse).to(tl.int32, bitcast=True)
        inside = (keys >= low) & (keys <= limit) & (at < length)
        tl.store(copy + filled * lanes + lane, logit, mask=inside)
        filled += inside.to(tl.int32)
    depth = tl.max(filled, axis=0)
    for line in range(depth):
        tl.store(copy + line * lanes + lane, float("-inf"), mask=line >= filled)
    tl.debug_barrier()  # other threads may read what this one wrote
    return depth * lanes


@triton.jit  # type: ignore[untyped-decorator]
def _border(  # type: ignore[no-untyped-def]
    row, vocab, most, inverse, target, copy,
    counted: tl.constexpr, bits: tl.constexpr, ways: tl.constexpr, passes: tl.constexpr,
    width: tl.constexpr, lanes: tl.constexpr, stages: tl.constexpr,
):  # fmt: skip
    """The least key up to which keys number, or weigh, at least `target`; infinity: there is none.

    What lies below `low` comes to less than the target, what lies up to `limit` does not.
    """
    low = tl.program_id(0) * 0
    limit = low + _INFINITY
    before = target * 0  # what the keys below `low` come to
    bounds = (128 + tl.arange(0, ways)) << 23  # distances 2, 4, 8, ..: most borders are there
    for _ in tl.static_range(passes):
        sums = _below(row, vocab, most, inverse, bounds, counted, ways, bits, width, stages)
        low, limit, before = _narrow(low, limit, before, bounds, sums, target)
        bounds = _bounds(low, limit, ways)
    length = _copy_between(row, vocab, most, inverse, low, limit, copy, lanes, stages)
    left = target - before
    while low < limit:
        bounds = _bounds(low, limit, ways)
        sums = _below(copy, length, most, inverse, bounds, counted, ways, bits, lanes, stages)
        low, limit, before = _narrow(low, limit, before, bounds, sums, left)
    tl.debug_barrier()  # the next search writes to the same copy
    return limit


@triton.jit  # type: ignore[untyped-decorator]
def _draw(  # type: ignore[no-untyped-def]
    logits, stride, adjusted, draws, count, best, copies, tokens, vocab,
    none: tl.constexpr, bits: tl.constexpr, tiles: tl.constexpr, ways: tl.constexpr,
    passes: tl.constexpr, width: tl.constexpr, lanes: tl.constexpr, stages: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0)
    at = tl.load(draws + index).to(tl.int64)
    source = tl.load(draws + count + index).to(tl.int64)
    temperature = tl.load(draws + 2 * count + index).to(tl.float32)
    top_k = tl.load(draws + 3 * count + index).to(tl.int64)
    top_p = tl.load(draws + 4 * count + index)
    furthest = tl.load(draws + 5 * count + index).to(tl.float32)
    uniform = tl.load(draws + 6 * count + index)
    if tl.load(best + at) == none:
        tl.store(tokens + index, tl.full((), none, tl.int64))
    else:
        row = logits + at * stride
        if source >= 0:
            row = adjusted + source * vocab
        copy = copies + index.to(tl.int64) * (vocab + lanes)

        largest = tl.full((width,), float("-inf"), tl.float32)
        for begin in tl.range(0, vocab, width, num_stages=stages):
            place = begin + tl.arange(0, width)
            logit = tl.load(row + place, mask=place < vocab, other=float("-inf"))
            largest = tl.maximum(largest, logit)
        most = tl.max(largest, axis=0)
        inverse = tl.minimum(1.0 / temperature, 3.0e38)  # finite, as 0 x infinity is NaN

        limit = tl.program_id(0) * 0 + _INFINITY
        if top_k > 0:
            limit = _border(
                row, vocab, most, inverse, tl.minimum(top_k, vocab), copy,
                True, bits, ways, passes, width, lanes, stages,
            )  # fmt: skip
        if top_p < 1.0:
            nearer = tl.full((1,), 0, tl.int32) + (limit - 1)
            total = tl.sum(_below(row, vocab, most, inverse, nearer, False, 1, bits, width, stages))
            if top_k > 0:
                # Of several that are the k-th, as many count as make up k.
                others = tl.sum(
                    _below(row, vocab, most, inverse, nearer, True, 1, bits, width, stages)
                )
                total += (tl.minimum(top_k, vocab) - others) * _weights(limit, bits)
            wanted = tl.maximum(tl.ceil(total.to(tl.float64) * top_p).to(tl.int64), 1)
            border = _border(
                row, vocab, most, inverse, wanted, copy,
                False, bits, ways, passes, width, lanes, stages,
            )  # fmt: skip
            limit = tl.minimum(limit, border)
        limit = tl.minimum(limit, furthest.to(tl.int32, bitcast=True))

        sums = tl.zeros((tiles,), tl.int64)
        for tile in tl.range(0, tl.cdiv(vocab, width), num_stages=stages):
            keys = _keys(row, tile * width + tl.arange(0, width), vocab, most, inverse)
            own = tl.sum(tl.where(keys <= limit, _weights(keys, bits), 0), axis=0)
            sums += tl.where(tl.arange(0, tiles) == tile, own, 0)
        total = tl.sum(sums, axis=0)
        share = tl.minimum((uniform * total.to(tl.float64)).to(tl.int64), total - 1)
        upto = tl.cumsum(sums, axis=0)
        begin = tl.sum((upto <= share).to(tl.int32), axis=0) * width
        share -= tl.max(tl.where(upto <= share, upto, 0), axis=0)
        keys = _keys(row, begin + tl.arange(0, width), vocab, most, inverse)
        upto = tl.cumsum(tl.where(keys <= limit, _weights(keys, bits), 0), axis=0)
        token = begin + tl.sum((upto <= share).to(tl.int32), axis=0)
        tl.store(tokens + index, token.to(tl.int64))


def draw(
    logits: torch.Tensor,
    adjusted: torch.Tensor | None,
    draws: torch.Tensor,
    best: torch.Tensor,
    none: int,
) -> torch.Tensor:
    """Draw one token for each column of `draws`.

    Args:
        logits: [R, V] float32, adjacent in a row; not changed.
        adjusted: [A, V] float32 contiguous: logits that some draws use instead.
        draws: [7, n] float64, see `FIELDS`. row: of `logits`. adjusted: row of `adjusted`, -1
            for none. temperature: above 0. top_k, top_p: 0 and 1 for no limit. furthest: the
            largest distance that min-p allows; infinity for no limit. uniform: in [0, 1).
        best: [R] int64, `none` where a row's logits are not finite.
        none: The token of such a row.

    Returns:
        [n] int64.
    """
    vocab, count = logits.shape[1], draws.shape[1]
    assert logits.stride(1) == 1
    width = min(_WIDTH, triton.next_power_of_2(vocab))
    lanes = min(_LANES, width)
    tokens = torch.empty(count, dtype=torch.int64, device=logits.device)
    _draw[(count,)](
        logits,
        logits.stride(0),
        logits if adjusted is None else adjusted,
        draws,
        count,
        best,
        torch.empty(count, vocab + lanes, device=logits.device),
        tokens,
        vocab,
        none=none,
        bits=62 - (vocab - 1).bit_length(),
        tiles=triton.next_power_of_2(triton.cdiv(vocab, width)),
        ways=_WAYS,
        passes=_PASSES,
        width=width,
        lanes=lanes,
        stages=_STAGES,
        num_warps=min(max(width // 128, 1), 32),
    )
    return tokens
