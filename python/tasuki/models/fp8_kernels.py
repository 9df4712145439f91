"""Kernels of GEMMs by weights of fp8, in Triton; CUDA only.

    round_rows    x ──add? norm? gate?──▶ fp8 with a scale for each 128 columns of a row
    one_row_fp8   one row by a weight of fp8: sums in registers, float32
    many_rows     rows of fp8 by a weight of fp8: tensor cores, both from memory

Sums of fp8 by fp8 leave the tensor cores after each 128 columns and are added up in float32,
times both scales: the tensor cores' own sums of fp8 have fewer bits. Triton's interpreter runs
these kernels on the CPU (TRITON_INTERPRET=1). This file owns no state.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


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
    blocks: tl.constexpr,
    dependent: tl.constexpr,
):
    # A program has `blocks` blocks of 128 columns of a row: all of them where it norms the row.
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
    rounded = (own / scale[:, None]).to(values.dtype.element_ty)
    tl.store(values + row * size + at, rounded, mask=mask)
    count: tl.constexpr = size // 128
    tl.store(scales + block * scales_stride + row, scale, mask=block < count)


@triton.jit  # type: ignore[untyped-decorator]
def one_row_fp8(  # type: ignore[no-untyped-def]
    x,
    norm,
    weight,
    scales,
    scales_row,
    scales_column,
    bias,
    result,
    out,
    eps,
    size: tl.constexpr,
    block_rows: tl.constexpr,
    normed: tl.constexpr,
    biased: tl.constexpr,
    gated: tl.constexpr,
    added: tl.constexpr,
    outs: tl.constexpr,
    blocks: tl.constexpr,
    stages: tl.constexpr,
    dependent: tl.constexpr,
):
    if dependent:
        gdc_wait()
    own = tl.program_id(0) * outs + tl.arange(0, outs)
    read = tl.minimum(own, out - 1).to(tl.int64)
    block = tl.arange(0, blocks)
    column = block[:, None] * 128 + tl.arange(0, 128)[None, :]
    count: tl.constexpr = size // 128
    of_block = block.to(tl.int64)[None, :] * scales_column
    gate_scales = scales + (read // block_rows)[:, None] * scales_row + of_block
    up_scales = scales + ((read + out) // block_rows)[:, None] * scales_row + of_block
    gates = weight + read[:, None, None] * size + column[None, :, :]
    ups = weight + (read + out)[:, None, None] * size + column[None, :, :]
    sums = tl.zeros((outs, blocks, 128), tl.float32)
    up_sums = tl.zeros((outs, blocks, 128), tl.float32)
    squares = tl.zeros((blocks, 128), tl.float32)
    for k in tl.range(0, count, blocks, num_stages=stages):
        values = tl.load(x + k * 128 + column).to(tl.float32)
        if normed:
            squares += values * values
            values *= tl.load(norm + k * 128 + column).to(tl.float32)
        scale = tl.load(gate_scales + k * scales_column)[:, :, None]
        sums += tl.load(gates + k * 128).to(tl.float32) * (values[None, :, :] * scale)
        if gated:
            up_scale = tl.load(up_scales + k * scales_column)[:, :, None]
            up_sums += tl.load(ups + k * 128).to(tl.float32) * (values[None, :, :] * up_scale)
    if dependent:
        gdc_launch_dependents()
    factor = 1.0
    if normed:
        factor = tl.rsqrt(tl.sum(tl.sum(squares, axis=1), axis=0) / size + eps)
    total = tl.sum(tl.sum(sums, axis=2), axis=1) * factor
    if biased:
        total += tl.load(bias + read).to(tl.float32)
    if gated:
        up = tl.sum(tl.sum(up_sums, axis=2), axis=1) * factor
        total = total / (1.0 + tl.exp(-total)) * up
    if added:
        total += tl.load(result + read).to(tl.float32)
    tl.store(result + own, total.to(result.dtype.element_ty), mask=own < out)


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
