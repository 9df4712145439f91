"""Kernels of GEMMs by weights of fp8, in Triton; CUDA only.

    round_rows    x ──add? norm? gate?──▶ fp8 with a scale for each 128 columns of a row
    few_rows_fp8  few rows of fp8 by a weight of fp8: bound by the reading of the weight
    many_rows     rows of fp8 by a weight of fp8: tensor cores, both from memory

One row alone is not rounded but divided into pieces of fp8 whose sum it is: `few_rows_fp8` takes
as long for some rows as for one.

Sums of fp8 by fp8 leave the tensor cores after each 128 columns and are added up in float32,
times both scales: the tensor cores' own sums of fp8 have fewer bits. Triton's interpreter runs
these kernels on the CPU (TRITON_INTERPRET=1). This file owns no state.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tasuki.models.gemm_kernels import prefetch_weight, summed


@triton.jit  # type: ignore[untyped-decorator]
def round_rows(  # type: ignore[no-untyped-def]
    x,
    x_stride,
    hidden,
    hidden_stride,
    norm,
    values,
    scales,
    scales_stride,
    eps,
    size: tl.constexpr,
    added: tl.constexpr,
    normed: tl.constexpr,
    gated: tl.constexpr,
    pieces: tl.constexpr,
    blocks: tl.constexpr,
    dependent: tl.constexpr,
):
    # A program has `blocks` blocks of 128 columns of a row: all of them where it norms the row.
    # More than one of `pieces`: of one row, which is their sum.
    if dependent:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * blocks + tl.arange(0, blocks)
    at = block[:, None] * 128 + tl.arange(0, 128)[None, :]
    mask = at < size
    x += row * x_stride
    own = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    if added:
        sum_at = hidden + row * hidden_stride + at
        own += tl.load(sum_at, mask=mask, other=0.0).to(tl.float32)
        kept = own.to(hidden.dtype.element_ty)
        tl.store(sum_at, kept, mask=mask)
        own = kept.to(tl.float32)
    if normed:
        square = tl.sum(tl.sum(own * own, axis=1), axis=0)
        own *= tl.rsqrt(square / size + eps)
        own *= tl.load(norm + at, mask=mask, other=0.0).to(tl.float32)
    if gated:
        own = own / (1.0 + tl.exp(-own)) * tl.load(x + size + at, mask=mask, other=0.0)
    largest = tl.max(tl.abs(own), axis=1)
    scale = tl.where(largest > 0.0, largest / 448.0, 1.0)
    count: tl.constexpr = size // 128
    for piece in tl.static_range(pieces):
        rounded = (own / scale[:, None]).to(values.dtype.element_ty)
        tl.store(values + (row + piece) * size + at, rounded, mask=mask)
        tl.store(scales + block * scales_stride + row + piece, scale, mask=block < count)
        own -= rounded.to(tl.float32) * scale[:, None]
        scale /= 16.0  # what is left is at most half of a step of four bits


@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def few_rows_fp8(  # type: ignore[no-untyped-def]
    x,
    x_scales,
    x_scales_stride,
    weight,
    weight_scales,
    scales_row,
    scales_column,
    bias,
    result,
    parts,
    counters,
    rows,
    out,
    size: tl.constexpr,
    block_rows: tl.constexpr,
    split: tl.constexpr,
    biased: tl.constexpr,
    of_one: tl.constexpr,
    held: tl.constexpr,
    outs: tl.constexpr,
    stages: tl.constexpr,
    dependent: tl.constexpr,
    ahead: tl.constexpr,
):
    # As gemm_kernels.few_rows: the weight's rows are the tensor cores' first operand, the rows
    # their second, and what the parts of the columns leave is added up by the last.
    count: tl.constexpr = size // 128
    share: tl.constexpr = (count + split - 1) // split
    tile = tl.program_id(0) // split
    turn = tl.program_id(0) % split
    begin = turn * share
    if dependent:
        # A weight depends on no kernel.
        early: tl.constexpr = ahead if ahead < share * 128 else share * 128
        first = tl.minimum(begin * 128, size - early)
        prefetch_weight(weight, tile * outs, first, out, size, outs, False, early)
        gdc_wait()
    own = tile * outs + tl.arange(0, outs)
    read = tl.minimum(own, out - 1).to(tl.int64)
    column = tl.arange(0, 128)
    row = tl.arange(0, held)
    mask = (own < out)[:, None] & (row < rows)[None, :]
    weight += read[:, None] * size + column[None, :]
    weight_scales += read // block_rows * scales_row
    x += row[:, None] * size + column[None, :]
    x_scales += row
    total = tl.zeros((outs, held), tl.float32)
    end = begin + share
    if share * split != count:
        end = tl.minimum(end, count)
    for block in tl.range(begin, end, num_stages=stages):
        values = tl.trans(tl.load(x + block * 128, mask=(row < rows)[:, None], other=0.0))
        scale = tl.load(weight_scales + block * scales_column)[:, None]
        scale *= tl.load(x_scales + block * x_scales_stride, mask=row < rows, other=0.0)[None, :]
        total += tl.dot(tl.load(weight + block * 128), values) * scale
    if dependent:
        gdc_launch_dependents()

    is_last = True
    if split > 1:
        step: tl.constexpr = outs * held
        at = row[None, :] * outs + tl.arange(0, outs)[:, None]
        part = parts + tile.to(tl.int64) * (split * step)
        tl.store(part + turn * step + at, total, mask=mask)
        tl.debug_barrier()  # all threads' parts are there before one of them says so
        is_last = tl.atomic_add(counters + tile, 1, sem="acq_rel") == split - 1
        if is_last:
            tl.store(counters + tile, 0)
            total = summed(part + at, split, step, mask)
    if is_last:
        left = mask
        if of_one:
            total = tl.zeros_like(total) + tl.sum(tl.where(mask, total, 0.0), axis=1)[:, None]
            left &= (row == 0)[None, :]
        if biased:
            total += tl.load(bias + own, mask=own < out, other=0.0).to(tl.float32)[:, None]
        place = result + row.to(tl.int64)[None, :] * out + own[:, None]
        tl.store(place, total.to(result.dtype.element_ty), mask=left)


@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def many_rows(  # type: ignore[no-untyped-def]
    x,
    x_scales,
    x_scales_stride,
    weight,
    weight_scales,
    scales_row,
    scales_column,
    bias,
    result,
    result_stride,
    rows,
    out,
    size: tl.constexpr,
    block_rows: tl.constexpr,
    biased: tl.constexpr,
    tall: tl.constexpr,
    outs: tl.constexpr,
    group: tl.constexpr,
    stages: tl.constexpr,
    dependent: tl.constexpr,
):
    # Programs that follow one another read the same weights, for `group` tiles of rows.
    if dependent:
        gdc_wait()
    count: tl.constexpr = size // 128
    row_tiles = tl.cdiv(rows, tall)
    each = group * tl.cdiv(out, outs)
    first_tile = tl.program_id(0) // each * group
    height = tl.minimum(row_tiles - first_tile, group)
    row_tile = first_tile + tl.program_id(0) % each % height
    out_tile = tl.program_id(0) % each // height
    row = row_tile * tall + tl.arange(0, tall)
    own = out_tile * outs + tl.arange(0, outs)
    column = tl.arange(0, 128)
    row_read = tl.minimum(row, rows - 1).to(tl.int64)
    read = tl.minimum(own, out - 1).to(tl.int64)
    x_at = x + row_read[:, None] * size + column[None, :]
    weight_at = weight + read[:, None] * size + column[None, :]
    x_scales += row_read
    weight_scales += read // block_rows * scales_row
    total = tl.zeros((tall, outs), tl.float32)
    for block in tl.range(0, count, num_stages=stages):
        values = tl.load(x_at + block * 128)
        tile = tl.trans(tl.load(weight_at + block * 128))
        scale = tl.load(weight_scales + block * scales_column)[None, :]
        scale *= tl.load(x_scales + block * x_scales_stride)[:, None]
        total += tl.dot(values, tile) * scale
    if dependent:
        gdc_launch_dependents()
    if biased:
        total += tl.load(bias + read).to(tl.float32)[None, :]
    at = result + row.to(tl.int64)[:, None] * result_stride + own[None, :]
    mask = (row < rows)[:, None] & (own < out)[None, :]
    tl.store(at, total.to(result.dtype.element_ty), mask=mask)
