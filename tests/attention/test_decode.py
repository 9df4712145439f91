"""Our decode kernels against attention by the definition, here by Triton's interpreter."""

from __future__ import annotations

import math
import mmap
import random
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from support.attention_cases import Case, Shape, definition, make_case, pad, spread
from support.kernels import DEVICE
from triton.runtime.interpreter import interpreter_builder

from tasuki.attention.batch import StepLimits
from tasuki.attention.decode import DecodeAttention, DecodePlan
from tasuki.attention.errors import AttentionError
from tasuki.attention.write import write

ERROR = 2e-3  # |got - want| / |want|; float16 alone gives 2e-4
UNEVEN = [5, 40, 1, 17, 90]
MAP_NORESERVE = 0x4000  # Linux; Python has had a name for it since 3.13


def make(
    lengths: list[int],
    *,
    kv_heads: int = 2,
    head_dim: int = 16,
    block_size: int = 16,
    garbage: float = math.nan,
    kv_dtype: torch.dtype | None = None,
    dtype: torch.dtype = torch.float16,
) -> Case:
    """Sequences whose last token's keys and values are written already."""
    blocks = sum(-(-n // block_size) for n in lengths) + 3
    shape = Shape(kv_heads, head_dim, block_size, blocks, dtype, kv_dtype=kv_dtype, device=DEVICE)
    case = make_case(1, shape, [(n - 1, 1) for n in lengths], garbage=garbage)
    write(case.new(case.keys), case.new(case.values), case.batch.slots, case.pool, 1)
    return case


def tiled(pool: torch.Tensor, heads: int, programs: int) -> DecodeAttention:
    """Attention with so many programs for each KV head, and tiles of 32 tokens."""
    return DecodeAttention(pool, heads, programs, tile_elements=32 * pool.shape[-1])


def attend(
    attention: DecodeAttention, case: Case, heads: int, window: int | None = None, again: int = 1
) -> float:
    """The relative error of the last of some runs of one plan."""
    query = case.query(heads)
    scale = case.shape.head_dim**-0.5
    plan = attention.plan(case.batch, window)
    for _ in range(again):
        result = torch.full_like(query, math.nan)
        attention.forward(plan, 1, query, scale, result)
    want = definition(case, query, scale, window)
    return float((result.double() - want).norm() / want.norm())


@pytest.mark.parametrize("programs", [1, 2, 3, 7, 40])
@pytest.mark.parametrize("lengths", [UNEVEN, [400], [1], [32, 64, 33, 31]], ids=str)
def test_any_division_of_the_work(lengths: list[int], programs: int) -> None:
    case = make(lengths)
    assert attend(tiled(case.pool, 6, programs), case, 6, again=2) < ERROR


@pytest.mark.skipif(DEVICE.type == "cuda", reason="a device's programs end in any order")
@pytest.mark.parametrize(
    ("lengths", "count"),
    [
        (UNEVEN, 4),
        ([400], 4),
        ([64] * 6, 4),
        ([100, 3, 90, 65], 4),
        pytest.param([288, 160, 64], 8, id="a program has ends of many pieces and of few"),
    ],
)
def test_any_order_of_the_programs(
    monkeypatch: pytest.MonkeyPatch, lengths: list[int], count: int
) -> None:
    """Whichever program comes last merges a row: its first piece's, its last one's, or both."""
    case, heads = make(lengths, dtype=torch.float32), 4  # float16 hides the order of sums
    query = case.query(heads)
    attention = tiled(case.pool, heads, count)
    plan = attention.plan(case.batch, None)

    def run() -> torch.Tensor:
        result = torch.full_like(query, math.nan)
        attention.forward(plan, 1, query, 0.25, result)
        assert not plan.buffers.arrived.any()
        return result

    want = run()
    assert (want.double() - definition(case, query, 0.25, None)).norm() < ERROR * want.norm()
    programs = list(range(count * case.shape.kv_heads))
    as_told, draw = interpreter_builder.set_grid_idx, random.Random(0)
    middle_last = sorted(programs, key=lambda at: at // case.shape.kv_heads == count // 2)
    drawn = (draw.sample(programs, len(programs)) for _ in "abc")
    for order in (programs[::-1], middle_last, *drawn):
        monkeypatch.setattr(
            interpreter_builder, "set_grid_idx", lambda x, y, z, o=order: as_told(o[x], y, z)
        )
        assert torch.equal(run(), want)


def test_a_plan_has_a_record_for_each_tile() -> None:
    """What a plan says; and a sequence longer than a program's share comes out right."""
    case = make([320, 3], kv_heads=1)
    attention = tiled(case.pool, 2, 5)
    plan = attention.plan(case.batch, None)
    assert plan.buffers.begins[:3].tolist() == [0, 10, 11]
    records = plan.buffers.records.view(-1, 4)[:11]
    assert records[:, 0].tolist() == [0] * 10 + [1]
    assert records[:, 1].tolist() == [*range(320, 0, -32), 3]
    table = case.batch.block_tables[0].tolist()
    assert records[:10, 2].tolist() == [block * 16 for block in table[::2]]
    assert records[:10, 3].tolist() == [block * 16 for block in table[1::2]]
    assert attend(attention, case, 2) < ERROR
    assert not plan.buffers.arrived.any(), "the next launch counts from 0"


@pytest.mark.parametrize("window", [1, 31, 33, 64])
def test_sliding_window(window: int) -> None:
    """Keys and values before the window are not even read."""
    case = make(UNEVEN)
    for row, length in enumerate(UNEVEN):
        for block in range(max(length - window, 0) // 32 * 2):
            case.pool[case.batch.block_tables[row, block].item()] = math.nan
    assert attend(tiled(case.pool, 4, 3), case, 4, window) < ERROR


@pytest.mark.parametrize("block_size", [1, 8, 20, 32, 64])
def test_block_sizes(block_size: int) -> None:
    case = make(UNEVEN, block_size=block_size)
    assert attend(tiled(case.pool, 4, 3), case, 4) < ERROR


@pytest.mark.parametrize("heads", [2, 14, 34])
def test_heads_that_share(heads: int) -> None:
    case = make([70, 3])
    assert attend(tiled(case.pool, heads, 3), case, heads) < ERROR


def test_fp8_cache() -> None:
    case = make(UNEVEN, kv_dtype=torch.float8_e4m3fn, garbage=0.0)
    # What fp8 has exactly: the interpreter does not round as the device does.
    for sequences in (case.keys, case.values):
        sequences[:] = [s.to(torch.float8_e4m3fn).to(torch.float16) for s in sequences]
    write(case.new(case.keys), case.new(case.values), case.batch.slots, case.pool, 1)
    assert attend(tiled(case.pool, 4, 3), case, 4) < ERROR


def test_a_graph_reads_what_later_plans_of_its_bucket_write() -> None:
    """The same memory for all plans of a bucket; a larger one leaves it alone."""
    bucket, heads, width = 4, 4, 12
    first, later = make([20, 90, 7], garbage=0.0), make([150, 1], garbage=0.0)
    pool = torch.zeros(max(len(first.pool), len(later.pool)), *first.pool.shape[1:])
    pool = pool.half().to(DEVICE)
    attention = tiled(pool, heads, 3)
    recorded = attention.plan(pad(first.batch, bucket, width), None)
    attention.plan(pad(first.batch, 2 * bucket, 2 * width), None)
    attention.plan(make([900]).batch, None)
    for case in (first, later, first):
        pool[: len(case.pool)] = case.pool
        count = case.batch.num_decodes
        query = torch.zeros(bucket, heads, 16, dtype=torch.float16, device=DEVICE)
        query[:count] = case.query(heads)
        plan = attention.plan(pad(case.batch, bucket, width), None)
        assert plan.buffers is recorded.buffers
        result = torch.full_like(query, math.nan)
        attention.forward(recorded, 1, query, 0.25, result)
        want = definition(case, query[:count], 0.25, None)
        assert (result[:count].double() - want).norm() < ERROR * want.norm()


@pytest.mark.filterwarnings("error::RuntimeWarning")  # a division by 0, say
def test_a_graph_of_mixed_steps_reads_what_later_plans_write() -> None:
    """Rows behind the decodes are prompts': left alone, however many decodes there are."""
    heads, limits = 4, StepLimits(tokens=8, decodes=6, chunks=2, width=12)
    cases = [make(lengths, garbage=0.0) for lengths in ([20, 90, 7], [150], UNEVEN, [64, 64])]
    pool = torch.zeros(max(len(case.pool) for case in cases), *cases[0].pool.shape[1:])
    pool = pool.half().to(DEVICE)
    attention = tiled(pool, heads, 3)

    def plan(case: Case, count: int) -> DecodePlan:
        rest = limits.tokens - count
        positions = F.pad(case.batch.positions[:count], (0, rest), value=179)
        return attention.plan(
            replace(case.batch, positions=positions, num_decodes=count, limits=limits), None
        )

    recorded = plan(cases[0], 0)
    for case, count in ((cases[0], 3), (cases[1], 1), (cases[2], 5), (cases[3], 0), (cases[3], 2)):
        pool[: len(case.pool)] = case.pool
        query = torch.zeros(limits.tokens, heads, 16, dtype=torch.float16, device=DEVICE)
        query[:count] = case.query(heads)[:count]
        assert plan(case, count).buffers is recorded.buffers
        assert recorded.buffers.begins[limits.decodes] == sum(
            -(-length // 32) for length in case.batch.context_lens[:count]
        )
        result = torch.full_like(query, math.nan)
        attention.forward(recorded, 1, query, 0.25, result)
        want = definition(case, case.query(heads), 0.25, None)[:count]
        assert (result[:count].double() - want).norm() <= ERROR * want.norm()
        assert result[count:].isnan().all()


def test_wider_tables_than_the_bucket_was_planned_for() -> None:
    case = make([90, 5])
    attention = tiled(case.pool, 4, 3)
    attention.plan(pad(make([1]).batch, 2, 1), None)
    with pytest.raises(AttentionError, match=r"have 4 tiles of 32 tokens.* for 3"):
        attention.plan(pad(case.batch, 2, 6), None)


def test_rows_of_the_query_may_lie_apart() -> None:
    """As they do in the result of one GEMM for queries, keys and values."""
    case = make(UNEVEN)
    query = case.query(4)
    apart = torch.zeros(5, 8, 16, dtype=torch.float16, device=DEVICE)
    apart[:, :4] = query
    attention = tiled(case.pool, 4, 3)
    plan = attention.plan(case.batch, None)
    results = [torch.empty_like(query) for _ in range(2)]
    attention.forward(plan, 1, query, 0.25, results[0])
    attention.forward(plan, 1, apart[:, :4], 0.25, results[1])
    assert torch.equal(*results)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="tests/gpu has a full pool on the device")
def test_a_full_pool() -> None:
    """Sequences all over a pool of 110 GB, of which only what they take is ever in memory."""
    shape = Shape(8, head_dim=128, block_size=32, num_blocks=40, dtype=torch.float16)
    case, layers, heads = make_case(1, shape, [(700, 1), (33, 1), (0, 1)]), 36, 16
    block = shape.kv_heads * layers * 2 * shape.block_size * shape.head_dim
    num_blocks = 110_000_000_000 // (2 * block)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    try:
        memory = mmap.mmap(-1, 2 * block * num_blocks, flags=flags)
    except OSError as error:
        pytest.skip(f"no address space without memory behind it (vm.overcommit_memory): {error}")
    pool = torch.frombuffer(memory, dtype=torch.float16)
    pool = pool.view(num_blocks, shape.kv_heads, layers, 2, shape.block_size, shape.head_dim)
    spread(case, pool, layer=1, into=layers - 1)
    write(case.new(case.keys), case.new(case.values), case.batch.slots, pool, layers - 1)
    query, scale = case.query(heads), shape.head_dim**-0.5
    attention, result = DecodeAttention(pool, heads), torch.full_like(query, math.nan)
    attention.forward(attention.plan(case.batch, None), layers - 1, query, scale, result)
    want = definition(case, query, scale, None)
    assert float((result.double() - want).norm() / want.norm()) < ERROR
