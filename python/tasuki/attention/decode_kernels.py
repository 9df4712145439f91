"""Attention of one token of each sequence over the paged cache, in Triton; CUDA only.

Bound by memory: the kernel's one aim is to keep reads in flight from its first
instruction to its last. So there is one wave of programs, each with an equal run
of *tiles* (some tokens of a sequence), one loop over them that does not end
between sequences, and loads that are several tiles ahead:

    tiles      | a0 a1 a2 a3 | b0 | c0 c1 c2 c3 c4 c5 c6 | d0 d1 |     of sequences a .. d
    programs   |---- 0 ----|---- 1 ----|---- 2 ----|---- 3 ----|      of each KV head
    pieces      a        a   b  c        c           c  d             one sequence in one program

A sequence in one piece is written at once. Otherwise each piece leaves its sums, and the program
that ends last merges them, in their order: results do not depend on which one that is. It merges
its first and its last sequence together where they are in few pieces. The rows of a tile's GEMMs
are the query heads that share the KV head, padded to 16.

Lengths are read from the device, in a step's plan (`lay_out`): a CUDA graph of
what follows stays right, and the host reckons nothing. A plan's records are one for
each tile: its row of the batch, how many tokens the sequence has from its begin
on, and the slot of each unit, a run of tokens that lies together. Results of rows
without tiles are left alone.

Arithmetic is float32 but for the GEMMs' operands. Slots beyond a sequence's
length are not read. Triton's interpreter runs the same code on the CPU (not in
bfloat16: its GEMMs know no such type). This file owns no state.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, num_threads

from tasuki.overlap import prefetch

TILE_BYTES = 16384  # of a tile's keys, and of its values
LOADS = 3  # depth of the loop's pipeline
WARPS = 4
RECORDS_AT_ONCE = 512
AHEAD = 1  # tiles of each program fetched before the kernel before is over; more is slower
ROWS_AT_ONCE = 32  # of pieces, one for each head that shares
FEW_PIECES = 3  # of a row, at most, to be merged together with the other row, two at a time


def shared_bytes(tile: int, head_dim: int, rows: int, itemsize: int) -> int:
    """Shared memory that a program of `attend` takes; tests compare it with the compiler's.

    Args:
        tile: tokens of a tile.
        head_dim: of the pool.
        rows: of the scores.
        itemsize: bytes of an element of the pool.
    """
    loading = 2 * (LOADS - 1) * tile * head_dim * itemsize
    return loading + 4 * rows * head_dim * max(itemsize, 2)


@triton.jit(do_not_specialize=["count", "table_stride"])  # type: ignore[untyped-decorator]
def lay_out(  # type: ignore[no-untyped-def]
    positions,
    tables,
    table_stride,
    count,
    begins,
    records,
    window: tl.constexpr,
    block_size: tl.constexpr,
    unit: tl.constexpr,
    tile: tl.constexpr,
    width: tl.constexpr,
    many: tl.constexpr,
):
    units: tl.constexpr = tile // unit
    row = tl.program_id(0)
    at = tl.arange(0, many)
    # A row that is padding has no token, and no tile.
    lengths = (tl.load(positions + at, mask=at < count, other=-1) + 1).to(tl.int32)
    skipped = tl.zeros_like(lengths)
    if window > 0:
        skipped = tl.maximum(lengths - window, 0) // tile
    tiles = tl.cdiv(lengths, tile) - skipped
    begin = tl.sum(tl.where(at < row, tiles, 0), axis=0)
    own = tl.sum(tl.where(at == row, tiles, 0), axis=0)
    length = tl.sum(tl.where(at == row, lengths, 0), axis=0)
    first = tl.sum(tl.where(at == row, skipped, 0), axis=0)
    tl.store(begins + row, begin)
    tl.store(begins + row + 1, begin + own)  # the same as the next row's own
    for done in range(0, own, width):
        which = done + tl.arange(0, width)
        mask = which < own
        token = (first + which) * tile
        record = records + (begin + which) * (2 + units)
        tl.store(record, row + tl.zeros_like(which), mask=mask)
        tl.store(record + 1, length - token, mask=mask)
        for index in tl.static_range(units):
            of_unit = token + index * unit
            there = mask & (of_unit < length)
            block = tl.load(tables + row * table_stride + of_unit // block_size, there, other=0)
            tl.store(record + 2 + index, block * block_size + of_unit % block_size, mask=mask)


@triton.jit
def _its_programs(begins, row, programs, total):  # type: ignore[no-untyped-def]
    """The first and the last program of a row: a tile's is the last that begins there or before."""
    begin, end = tl.load(begins + row), tl.load(begins + row + 1)
    total = tl.maximum(total, 1)
    return ((begin + 1) * programs - 1) // total, (end * programs - 1) // total


@triton.jit  # type: ignore[untyped-decorator]
def _merge(  # type: ignore[no-untyped-def]
    mine,
    query,
    row,
    first,
    last,
    most,
    head,
    sums,
    weights,
    arrived,
    result,
    value_scale,
    kv_heads: tl.constexpr,
    share: tl.constexpr,
    head_dim: tl.constexpr,
    at_once: tl.constexpr,
):
    """Merge the pieces, at `most` so many, that programs `first` to `last` left of `row`.

    `mine` and `query` are [rows]: the query heads of a row, or of two rows; then the others, too.
    """
    at = tl.arange(0, head_dim)
    top = tl.where(mine, float("-inf"), 0.0)
    weight = tl.where(mine, 0.0, 1.0)
    sum_ = tl.zeros([mine.shape[0], head_dim], tl.float32)
    each = tl.zeros_like(query)
    row, first, last = row + each, first + each, last + each
    for done in range(0, most, at_once):
        program = first[None, :] + done + tl.arange(0, at_once)[:, None]
        mask = mine[None, :] & (program <= last[None, :])
        side = (program == first[None, :]).to(tl.int32)
        piece = ((program * 2 + side) * kv_heads + head) * share + query[None, :]
        its_top = tl.load(weights + piece * 2, mask, float("-inf"), cache_modifier=".cg")
        its_weight = tl.load(weights + piece * 2 + 1, mask, 0.0, cache_modifier=".cg")
        its_sum = tl.load(
            sums + piece[:, :, None] * head_dim + at[None, None, :],
            mask[:, :, None],
            0.0,
            cache_modifier=".cg",
        )
        new_top = tl.maximum(top, tl.max(its_top, axis=0))
        kept = tl.exp2(top - new_top)
        factor = tl.exp2(its_top - new_top[None, :])
        weight = weight * kept + tl.sum(its_weight * factor, axis=0)
        sum_ = sum_ * kept[:, None] + tl.sum(its_sum * factor[:, :, None], axis=0)
        top = new_top
    target = result + ((row * kv_heads + head) * share + query).to(tl.int64)[:, None] * head_dim
    mean = sum_ * value_scale / weight[:, None]
    tl.store(target + at[None, :], mean.to(result.dtype.element_ty), mask=mine[:, None])
    tl.store(arrived + row * kv_heads + head, 0, mask=mine & (query == 0))


@triton.jit  # type: ignore[untyped-decorator]
def _fetch(  # type: ignore[no-untyped-def]
    keys,
    block_stride,
    side_stride,
    records,
    fields: tl.constexpr,
    begin,
    end,
    head_dim: tl.constexpr,
    block_size: tl.constexpr,
    unit: tl.constexpr,
    tile: tl.constexpr,
    ahead: tl.constexpr,
):
    """Prefetch the first tiles of a program.

    A request is for the keys or the values of a unit: the threads of a warp make theirs one
    after another. So few of them do, and each warp its share.
    """
    units: tl.constexpr = tile // unit
    threads: tl.constexpr = num_threads()
    thread = tl.arange(0, threads)
    request = thread % 32 * (threads // 32) + thread // 32
    side = request % 2
    index = request // 2 % units
    which = begin + request // (2 * units)
    mine = (request < ahead * units * 2) & (which < end)
    record = records + which * fields
    left = tl.load(record + 1, mask=mine, other=0) - index * unit
    slot = tl.load(record + 2 + index, mask=mine, other=0)
    place = (slot // block_size).to(tl.int64) * block_stride + (slot % block_size) * head_dim
    address = (keys + side * side_stride + place).to(tl.int64)
    head_bytes: tl.constexpr = head_dim * keys.dtype.element_ty.primitive_bitwidth // 8
    prefetch(address, tl.minimum(tl.maximum(left, 0), unit) * head_bytes)


@triton.jit  # type: ignore[untyped-decorator]
def _of_pairs(pairs, assembled: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first and the second of two numbers of fp8 each, in float16."""
    if assembled:  # two numbers in one instruction
        return tl.inline_asm_elementwise(
            "{ .reg .b32 firsts, seconds; .reg .b16 low, high;"
            " prmt.b32 firsts, $2, 0, 0x20; prmt.b32 seconds, $2, 0, 0x31;"
            " cvt.u16.u32 low, firsts; cvt.u16.u32 high, seconds;"
            " cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }",
            "=r,=r,r",
            [pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    first, second = pairs.to(tl.uint8), (pairs >> 8).to(tl.uint8)
    first = first.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    second = second.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    return first, second


@triton.jit(do_not_specialize=["sequences", "programs"])  # type: ignore[untyped-decorator]
def attend(  # type: ignore[no-untyped-def]
    query,
    query_stride,
    result,
    pool,
    block_stride,
    head_stride,
    side_stride,
    sequences,
    begins,
    records,
    programs,
    sums,
    weights,
    arrived,
    scale,
    value_scale,
    window: tl.constexpr,
    kv_heads: tl.constexpr,
    share: tl.constexpr,
    head_dim: tl.constexpr,
    block_size: tl.constexpr,
    unit: tl.constexpr,
    tile: tl.constexpr,
    least_tiles: tl.constexpr,
    loads: tl.constexpr,
    rows: tl.constexpr,
    merged_rows: tl.constexpr,
    few_pieces: tl.constexpr,
    many_at_once: tl.constexpr,
    dependent: tl.constexpr,
    ahead: tl.constexpr,
    assembled: tl.constexpr,
):
    if dependent:
        gdc_launch_dependents()
    units: tl.constexpr = tile // unit
    fields: tl.constexpr = 2 + units
    of_fp8: tl.constexpr = pool.dtype.element_ty.primitive_bitwidth == 8
    head = tl.program_id(0) % kv_heads
    program = tl.program_id(0) // kv_heads
    total = tl.load(begins + sequences)
    # The rest has nothing to do; nor has the first one, where there are no tiles.
    programs = tl.maximum(tl.minimum(programs, tl.cdiv(total, least_tiles)), 1)
    begin = tl.minimum(program, programs) * total // programs
    end = tl.minimum(program + 1, programs) * total // programs

    group = tl.arange(0, rows)
    at = tl.arange(0, head_dim)
    token = tl.arange(0, tile)
    query += head * (share * head_dim)
    keys = pool + head.to(tl.int64) * head_stride
    top = tl.full([rows], float("-inf"), tl.float32)
    each_weight = tl.zeros([rows, tile], tl.float32)  # added up at a piece's end only
    columns: tl.constexpr = head_dim // 2 if of_fp8 else head_dim
    sum_ = tl.zeros([rows, columns], tl.float32)
    odd_sum = tl.zeros([rows, columns], tl.float32)  # of fp8 alone
    # A tile's record is read while the one before is under way: its addresses are
    # known when its turn to be loaded comes.
    record = records + begin * fields
    next_row = tl.load(record)
    next_left = tl.load(record + 1)
    next_low = tl.load(record + 2)
    next_high = tl.load(record + fields - 1)
    next_second, next_third = next_low, next_high
    if units == 4:
        next_second, next_third = tl.load(record + 3), tl.load(record + 4)
    # The rows of the first and of the last tile, and who has pieces of them.
    row_0, row_1 = next_row, tl.load(records + tl.maximum(end - 1, begin) * fields)
    if dependent:
        # Plan and cache are older than the kernel before this one, but for one token.
        _fetch(keys, block_stride, side_stride, records, fields, begin, end,
               head_dim, block_size, unit, tile, ahead)  # fmt: skip
    first_0, last_0 = _its_programs(begins, row_0, programs, total)
    first_1, last_1 = _its_programs(begins, row_1, programs, total)
    if dependent:
        gdc_wait()
    for t in tl.range(begin, end, num_stages=loads):
        row, left, low, high = next_row, next_left, next_low, next_high
        second, third = next_second, next_third
        record += fields
        next_row = tl.load(record)
        next_left = tl.load(record + 1)
        next_low = tl.load(record + 2)
        next_high = tl.load(record + fields - 1)
        if units == 4:
            next_second, next_third = tl.load(record + 3), tl.load(record + 4)
        if units == 1:
            slot = low + token
        elif units == 2:
            slot = tl.where(token < unit, low, high) + token % unit
        elif units == 4:
            slot = tl.where(token < unit, low, second)
            slot = tl.where(token < 2 * unit, slot, tl.where(token < 3 * unit, third, high))
            slot += token % unit
        else:
            slot = tl.load(record - fields + 2 + token // unit) + token % unit
        place = (slot // block_size).to(tl.int64) * block_stride + (slot % block_size) * head_dim
        seen = token < left
        if window > 0:
            seen &= token >= left - window
        mine = query + row.to(tl.int64) * query_stride + group[:, None] * head_dim + at[None, :]
        q = tl.load(mine, mask=(group < share)[:, None], other=0.0)
        k = tl.load(keys + place[None, :] + at[:, None], mask=seen[None, :], other=0.0)
        if of_fp8:
            half = tl.arange(0, columns)[None, :]
            pairs = (keys + side_stride + place[:, None]).to(tl.pointer_type(tl.uint16)) + half
            v = tl.load(pairs, mask=seen[:, None], other=0)
            q, k = q.to(tl.float32).to(tl.float16), k.to(tl.float16)
        else:
            v = tl.load(
                keys + side_stride + place[:, None] + at[None, :], mask=seen[:, None], other=0.0
            )
        scores = tl.dot(q, k) * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        probabilities = tl.exp2(scores - new_top[:, None])
        kept = tl.exp2(top - new_top)
        each_weight = each_weight * kept[:, None] + probabilities
        probabilities = probabilities.to(q.dtype)
        if of_fp8:
            v, odd = _of_pairs(v, assembled)
            odd_sum = tl.dot(probabilities, odd, odd_sum * kept[:, None])
        sum_ = tl.dot(probabilities, v, sum_ * kept[:, None])
        top = new_top

        is_last = left <= tile
        if is_last | (t + 1 == end):
            weight = tl.sum(each_weight, axis=1)
            has_first = tl.load(begins + row) >= begin
            whole = has_first & is_last
            to_result = (group < tl.where(whole, share, 0))[:, None]
            to_piece = group < tl.where(whole, 0, share)
            target = result + (row * kv_heads + head).to(tl.int64) * (share * head_dim)
            target += group[:, None] * head_dim + at[None, :]
            all_sums = tl.interleave(sum_, odd_sum) if of_fp8 else sum_
            mean = all_sums / weight[:, None] * value_scale
            tl.store(target, mean.to(result.dtype.element_ty), mask=to_result)
            piece = ((program * 2 + has_first.to(tl.int32)) * kv_heads + head) * share + group
            piece_sums = sums + piece[:, None] * head_dim + at[None, :]
            tl.store(piece_sums, all_sums, mask=to_piece[:, None])
            tl.store(weights + piece * 2, top, mask=to_piece)
            tl.store(weights + piece * 2 + 1, weight, mask=to_piece)
            top = tl.full([rows], float("-inf"), tl.float32)
            each_weight = tl.zeros([rows, tile], tl.float32)
            sum_ = tl.zeros([rows, columns], tl.float32)
            odd_sum = tl.zeros([rows, columns], tl.float32)

    tl.debug_barrier()  # what every thread left is left before one of them tells
    # Its first row, if it began before this program, and its last one, if it goes on after it.
    pieces_0, pieces_1 = last_0 - first_0, last_1 - first_1  # beside one
    side = tl.arange(0, 2)
    others = tl.where(side == 0, program - first_0, tl.where(first_1 == program, pieces_1, 0))
    divided = tl.where(begin < end, others, 0) > 0
    counts = arrived + tl.where(side == 0, row_0, row_1) * kv_heads + head
    before = tl.atomic_add(counts, 1, mask=divided, sem="acq_rel", scope="gpu")
    whole = (divided & (before == tl.where(side == 0, pieces_0, pieces_1))).to(tl.int32)
    whole_0 = tl.sum(tl.where(side == 0, whole, 0), axis=0)
    whole_1 = tl.sum(tl.where(side == 1, whole, 0), axis=0)
    # The row alone decides how it is merged, so that results do not depend on who merges it.
    few_0 = tl.where(pieces_0 < few_pieces, whole_0, 0)
    few_1 = tl.where(pieces_1 < few_pieces, whole_1, 0)
    of_one = tl.arange(0, merged_rows)
    if whole_0 > few_0:
        _merge(of_one < share, of_one, row_0, first_0, last_0, pieces_0 + 1, head, sums, weights,
               arrived, result, value_scale, kv_heads, share, head_dim, many_at_once)  # fmt: skip
    if whole_1 > few_1:
        _merge(of_one < share, of_one, row_1, first_1, last_1, pieces_1 + 1, head, sums, weights,
               arrived, result, value_scale, kv_heads, share, head_dim, many_at_once)  # fmt: skip
    if few_0 + few_1 > 0:
        of_both = tl.arange(0, 2 * merged_rows)
        is_0, of_its = of_both < merged_rows, of_both % merged_rows
        mine = (tl.where(is_0, few_0, few_1) > 0) & (of_its < share)
        most = tl.maximum(few_0 * pieces_0, few_1 * pieces_1) + 1
        _merge(mine, of_its, tl.where(is_0, row_0, row_1), tl.where(is_0, first_0, first_1),
               tl.where(is_0, last_0, last_1), most, head, sums, weights, arrived, result,
               value_scale, kv_heads, share, head_dim, 2)  # fmt: skip
