"""Kernels of GEMMs with few rows and what surrounds them, in Triton; CUDA only.

With few rows a GEMM is the reading of its weight, and what costs beside it are
the ends of kernels. So the norm before it, the gate and the residual behind it are
part of its kernel, and kernels overlap at their ends (overlap.py), where the next
one prefetches its first weights.

    one_row    x ──norm?──▶ sums in registers, float32, over columns ──▶ bias? gate? add?
    few_rows   x ──▶ tensor cores: [64 of the weight's rows] x [rows]  ──▶ norm? bias? gate? add?
                 a weight of few rows is divided by columns as well: each program leaves
                 its part, and whoever comes last adds them up, in their order

A norm is a factor for each column, its weight, and one for each row. A GEMM that adds may
leave what it made times the next norm's weight (`Weighted`, ops.py), and each tile's squares of it,
[tiles, rows]; the GEMM after it adds these up in their order, and has the rows' factors.

Results do not depend on who was last. Triton's interpreter runs both on the CPU
(TRITON_INTERPRET=1). This file owns no state.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, num_threads

from tasuki.overlap import prefetch

AHEAD = 256  # columns of a weight's row that are prefetched
AHEAD_OF_ONE = 512  # the same in GEMMs of one row; twice as many bring less


@triton.jit  # type: ignore[untyped-decorator]
def prefetch_weight(  # type: ignore[no-untyped-def]
    weight,
    first_out,
    column,
    out,
    size: tl.constexpr,
    outs: tl.constexpr,
    gated: tl.constexpr,
    columns: tl.constexpr,
):
    """Prefetch the first columns of a program's part of the weight.

    A request is for a row of it; of a gated one there are twice as many.
    """
    threads: tl.constexpr = num_threads()
    requests: tl.constexpr = outs * (1 + gated)
    item_bytes: tl.constexpr = weight.dtype.element_ty.primitive_bitwidth // 8
    for done in tl.static_range(0, requests, threads):
        request = done + tl.arange(0, threads)
        its_out = first_out + request % outs
        mine = (request < requests) & (its_out < out)
        row = (its_out + request // outs * out).to(tl.int64)
        address = (weight + row * size + column).to(tl.int64)
        prefetch(address, tl.where(mine, columns * item_bytes, 0))


@triton.jit  # type: ignore[untyped-decorator]
def _rows_values(x, norm, at, normed: tl.constexpr):  # type: ignore[no-untyped-def]
    """A row's numbers, and their squares where they are to be normed."""
    values = tl.load(x + at).to(tl.float32)
    squares = values * values
    if normed:
        values *= tl.load(norm + at).to(tl.float32)
    return values, squares


@triton.jit  # type: ignore[untyped-decorator]
def one_row(  # type: ignore[no-untyped-def]
    x,
    norm,
    weight,
    bias,
    result,
    out,
    eps,
    size: tl.constexpr,
    normed: tl.constexpr,
    biased: tl.constexpr,
    gated: tl.constexpr,
    added: tl.constexpr,
    outs: tl.constexpr,
    columns: tl.constexpr,
    stages: tl.constexpr,
    dependent: tl.constexpr,
    ahead: tl.constexpr,
):
    if dependent:
        # A weight depends on no kernel.
        prefetch_weight(weight, tl.program_id(0) * outs, 0, out, size, outs, gated, ahead)
        gdc_wait()
    own = tl.program_id(0) * outs + tl.arange(0, outs)
    column = tl.arange(0, columns)
    read = tl.minimum(own, out - 1).to(tl.int64)
    gates = weight + read[:, None] * size + column[None, :]
    ups = weight + (read + out)[:, None] * size + column[None, :]
    sums = tl.zeros((outs, columns), tl.float32)
    up_sums = tl.zeros((outs, columns), tl.float32)
    squares = tl.zeros((columns,), tl.float32)
    for k in tl.range(0, size, columns, num_stages=stages):
        values, own_squares = _rows_values(x, norm, k + column, normed)
        squares += own_squares
        sums += tl.load(gates + k).to(tl.float32) * values[None, :]
        if gated:
            up_sums += tl.load(ups + k).to(tl.float32) * values[None, :]
    if dependent:
        gdc_launch_dependents()
    total = tl.sum(sums, axis=1)
    up = tl.sum(up_sums, axis=1)
    factor = 1.0
    if normed:
        factor = tl.rsqrt(tl.sum(squares, axis=0) / size + eps)
    total *= factor
    if biased:
        total += tl.load(bias + read).to(tl.float32)
    if gated:
        total = total / (1.0 + tl.exp(-total)) * (up * factor)
    if added:
        total += tl.load(result + read).to(tl.float32)
    tl.store(result + own, total.to(result.dtype.element_ty), mask=own < out)


@triton.jit  # type: ignore[untyped-decorator]
def summed(part, split: tl.constexpr, step: tl.constexpr, mask):  # type: ignore[no-untyped-def]
    # Past the first-level cache, which may hold what an earlier kernel left there.
    total = tl.load(part, mask=mask, other=0.0, cache_modifier=".cg")
    for i in tl.static_range(1, split):
        total += tl.load(part + i * step, mask=mask, other=0.0, cache_modifier=".cg")
    return total


@triton.jit  # type: ignore[untyped-decorator]
def _ask(  # type: ignore[no-untyped-def]
    result,
    result_stride,
    squares,
    own,
    row,
    mask,
    width: tl.constexpr,
    stretches: tl.constexpr,
    added: tl.constexpr,
):
    """What the end needs of the rows is asked for at the beginning: their sums of squares, and
    what is added to.
    """
    at = result + row.to(tl.int64)[None, :] * result_stride + own[:, None]
    before, sums = 0.0, 0.0
    if added:
        before = tl.load(at, mask=mask, other=0.0, cache_modifier=".cg")
    if stretches:
        stretch = tl.arange(0, triton.next_power_of_2(stretches))[:, None]
        sums_at = squares + stretch * width + row[None, :]
        sums = tl.load(sums_at, mask=stretch < stretches, other=0.0, cache_modifier=".cg")
    return at, before, sums


@triton.jit  # type: ignore[untyped-decorator]
def _finish(  # type: ignore[no-untyped-def]
    total,
    up,
    sums,
    before,
    bias,
    norms,
    at,
    weighted,
    left_squares,
    own,
    row,
    out,
    mask,
    eps,
    size: tl.constexpr,
    stretches: tl.constexpr,
    biased: tl.constexpr,
    gated: tl.constexpr,
    added: tl.constexpr,
    weighing: tl.constexpr,
):
    if stretches:
        factor = tl.rsqrt(tl.sum(sums, axis=0) / size + eps)[None, :]
        total *= factor
        up *= factor
    if biased:
        total += tl.load(bias + own[:, None], mask=mask, other=0.0).to(tl.float32)
    if gated:
        total = total / (1.0 + tl.exp(-total)) * up
    if added:
        total += before.to(tl.float32)
    rounded = total.to(at.dtype.element_ty)
    tl.store(at, rounded, mask=mask)
    if weighing:
        values = tl.where(mask, rounded.to(tl.float32), 0.0)
        tl.store(left_squares + row, tl.sum(values * values, axis=0))
        place = weighted + row[None, :] * out + own[:, None]
        tl.store(place, (values * norms[:, None]).to(weighted.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def few_rows(  # type: ignore[no-untyped-def]
    x,
    x_stride,
    x_blocks,
    x_2_blocks,
    squares,
    weight,
    weight_blocks,
    bias,
    result,
    result_stride,
    norm,
    weighted,
    left_squares,
    parts,
    counters,
    rows,
    out,
    eps,
    size: tl.constexpr,
    split: tl.constexpr,
    stretches: tl.constexpr,
    biased: tl.constexpr,
    gated: tl.constexpr,
    added: tl.constexpr,
    weighing: tl.constexpr,
    first: tl.constexpr,
    second: tl.constexpr,
    outs: tl.constexpr,
    columns: tl.constexpr,
    stages: tl.constexpr,
    dependent: tl.constexpr,
    ahead: tl.constexpr,
):
    # Rows are taken in two groups of powers of two, the second of which may be empty.
    # With `stretches` x is weighted: so many sums of squares each row has. What a step reads is
    # copied in blocks (TMA) where `weight_blocks` and the rows' describe them.
    in_blocks: tl.constexpr = weight_blocks is not None
    share: tl.constexpr = (size // columns + split - 1) // split * columns
    held: tl.constexpr = outs * (first + second)
    tile = tl.program_id(0) // split
    turn = tl.program_id(0) % split
    begin = turn * share
    if dependent:
        # A weight depends on no kernel.
        early: tl.constexpr = ahead if ahead < share else share
        column = tl.minimum(begin, size - early)
        prefetch_weight(weight, tile * outs, column, out, size, outs, gated, early)
        gdc_wait()
    own = tile * outs + tl.arange(0, outs)
    column = begin + tl.arange(0, columns)
    read = tl.minimum(own, out - 1).to(tl.int64)
    gates = weight + read[:, None] * size + column[None, :]
    ups = weight + (read + out)[:, None] * size + column[None, :]
    row = tl.arange(0, first)
    mask = (own < out)[:, None] & (row < rows)[None, :]
    result_at, before, sums = _ask(
        result, result_stride, squares, own, row, mask, first + second, stretches, added
    )
    norms = 0.0
    if weighing:
        norms = tl.load(norm + own, mask=own < out, other=0.0).to(tl.float32)
    x_at = x + row[:, None] * x_stride + column[None, :]
    total = tl.zeros((outs, first), tl.float32)
    up = tl.zeros((outs, first), tl.float32)
    if second:
        row_2 = first + tl.arange(0, second)
        mask_2 = (own < out)[:, None] & (row_2 < rows)[None, :]
        result_2_at, before_2, sums_2 = _ask(
            result, result_stride, squares, own, row_2, mask_2, first + second, stretches, added
        )
        x_2_at = x + row_2[:, None] * x_stride + column[None, :]
        total_2 = tl.zeros((outs, second), tl.float32)
        up_2 = tl.zeros((outs, second), tl.float32)
    span = share
    if share * split != size:
        span = tl.minimum(share, size - begin)
    for k in tl.range(0, span, columns, num_stages=stages):
        if in_blocks:
            values = tl.trans(x_blocks.load([0, begin + k]))
            gate = weight_blocks.load([tile * outs, begin + k])
        else:
            values = tl.trans(tl.load(x_at + k, mask=(row < rows)[:, None], other=0.0))
            gate = tl.load(gates + k)
        total = tl.dot(gate, values, total)
        if second:
            if in_blocks:
                values_2 = tl.trans(x_2_blocks.load([first, begin + k]))
            else:
                values_2 = tl.trans(tl.load(x_2_at + k, mask=(row_2 < rows)[:, None], other=0.0))
            total_2 = tl.dot(gate, values_2, total_2)
        if gated:
            if in_blocks:
                upper = weight_blocks.load([out + tile * outs, begin + k])
            else:
                upper = tl.load(ups + k)
            up = tl.dot(upper, values, up)
            if second:
                up_2 = tl.dot(upper, values_2, up_2)
    if dependent:
        gdc_launch_dependents()

    at = row[None, :] * outs + tl.arange(0, outs)[:, None]
    if second:
        at_2 = row_2[None, :] * outs + tl.arange(0, outs)[:, None]
    is_last = True
    if split > 1:
        step: tl.constexpr = 2 * held if gated else held
        part = parts + tile.to(tl.int64) * (split * step)
        left = part + turn * step
        tl.store(left + at, total, mask=mask)
        if gated:
            tl.store(left + held + at, up, mask=mask)
        if second:
            tl.store(left + at_2, total_2, mask=mask_2)
            if gated:
                tl.store(left + held + at_2, up_2, mask=mask_2)
        tl.debug_barrier()  # all threads' parts are there before one of them says so
        is_last = tl.atomic_add(counters + tile, 1, sem="acq_rel") == split - 1
        if is_last:
            tl.store(counters + tile, 0)
            total = summed(part + at, split, step, mask)
            if gated:
                up = summed(part + held + at, split, step, mask)
            if second:
                total_2 = summed(part + at_2, split, step, mask_2)
                if gated:
                    up_2 = summed(part + held + at_2, split, step, mask_2)
    if is_last:
        left_squares += tile * (first + second)
        _finish(
            total,
            up,
            sums,
            before,
            bias,
            norms,
            result_at,
            weighted,
            left_squares,
            own,
            row,
            out,
            mask,
            eps,
            size,
            stretches,
            biased,
            gated,
            added,
            weighing,
        )
        if second:
            _finish(
                total_2,
                up_2,
                sums_2,
                before_2,
                bias,
                norms,
                result_2_at,
                weighted,
                left_squares,
                own,
                row_2,
                out,
                mask_2,
                eps,
                size,
                stretches,
                biased,
                gated,
                added,
                weighing,
            )
