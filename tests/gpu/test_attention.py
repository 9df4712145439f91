"""FlashInfer and our decodes on our block layout against attention by the definition in float64.

Tolerances are relative: |got - want| / |want| over a whole result. Rounding the
result to bfloat16 alone gives 1.7e-3; the kernels round the probabilities too.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from fp8 import needs_fp8
from support.attention_cases import Case, Shape, definition, make_case, pad

pytest.importorskip("flashinfer", reason="FlashInfer is not installed (optional: tasuki[gpu])")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

import flashinfer

from tasuki.attention.batch import Batch, StepLimits
from tasuki.attention.flashinfer import FlashInferAttention
from tasuki.attention.flashinfer_kernels import FlashInferOptions
from tasuki.attention.write import write
from tasuki.device_limits import limits_of

BFLOAT16_ERROR = 5e-3
# Keys, values and what is read back are the same rounded numbers: the definition
# rounds them too. What is left is as in bfloat16.
FP8_ERROR = 5e-3

DECODES = [(n, 1) for n in (0, 15, 16, 17, 63, 100, 769, 1023, 2500)]
WHOLE = [(0, 100), (0, 1024), (0, 2), (0, 17)]
LATER = [(512, 300), (17, 40), (1000, 129)]
STEPS = {
    "decodes": DECODES,
    "whole prompts": WHOLE,
    "later chunks": LATER,
    "mixed": [*DECODES, *WHOLE, *LATER],
    "one decode": [(4000, 1)],
}


def make(
    step: list[tuple[int, int]],
    *,
    kv_heads: int = 8,
    block_size: int = 16,
    kv_dtype: torch.dtype | None = None,
    layer: int = 1,
) -> Case:
    blocks = sum(-(-(a + b) // block_size) for a, b in step) + 64
    shape = Shape(
        kv_heads,
        head_dim=128,
        block_size=block_size,
        num_blocks=blocks,
        dtype=torch.bfloat16,
        kv_dtype=kv_dtype,
        device="cuda",
    )
    return make_case(layer, shape, step)


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Kernels that several tests need: together, where none of them has been compiled."""
    fp8 = torch.float8_e4m3fn
    FlashInferAttention(make([(0, 1)]).pool, 32, torch.bfloat16, windows=(None, 1))
    if limits_of(torch.device("cuda", 0)).has_fp8:
        FlashInferAttention(make([(0, 1)], kv_dtype=fp8).pool, 32, torch.bfloat16)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def run(
    case: Case,
    heads: int,
    window: int | None = None,
    layer: int = 1,
    **options: bool | str | None,
) -> float:
    query = case.query(heads)
    backend = FlashInferAttention(
        case.pool,
        heads,
        torch.bfloat16,
        FlashInferOptions(**options),  # type: ignore[arg-type]
    )
    backend.plan(case.batch)
    scale = 128**-0.5
    got = case.run(backend, layer, query, scale=scale, window=window)
    return error(got, definition(case, query, scale, window))


@pytest.mark.parametrize("heads", [32, 8, 56], ids=["group 4", "group 1", "group 7"])
@pytest.mark.parametrize("step", STEPS)
def test_steps(step: str, heads: int) -> None:
    assert run(make(STEPS[step]), heads) < BFLOAT16_ERROR


@pytest.mark.parametrize(
    "options",
    [
        {"ragged": False},
        {"joint": True},
        {"prefill": "fa2"},
        {"prefill": "fa2", "ragged": False},
    ],
    ids=str,
)
def test_every_way_to_run_a_mixed_step(options: dict[str, bool | str | None]) -> None:
    assert run(make(STEPS["mixed"]), 32, **options) < BFLOAT16_ERROR
    assert run(make(WHOLE), 32, **options) < BFLOAT16_ERROR


@pytest.mark.parametrize("block_size", [8, 32, 64])
@pytest.mark.parametrize("step", ["decodes", "mixed"])
def test_block_sizes(step: str, block_size: int) -> None:
    case = make(STEPS[step], block_size=block_size)
    assert run(case, 32) < BFLOAT16_ERROR


@pytest.mark.parametrize("window", [1, 100])
@pytest.mark.parametrize("step", ["decodes", "whole prompts", "mixed"])
def test_sliding_window(step: str, window: int) -> None:
    assert run(make(STEPS[step]), 32, window) < BFLOAT16_ERROR


@needs_fp8
@pytest.mark.parametrize("step", STEPS)
def test_fp8_cache(step: str) -> None:
    """Whole prompts read the step's own keys and values, which nothing rounds."""
    case = make(STEPS[step], kv_dtype=torch.float8_e4m3fn)
    assert run(case, 32, ragged=False) < FP8_ERROR


@pytest.mark.parametrize("heads", [32, 8, 56, 136], ids=lambda heads: f"group {heads // 8}")
@pytest.mark.parametrize("step", [*STEPS, "many"])
def test_decodes(step: str, heads: int) -> None:
    """`many`: more tiles than programs, sequences of one tile and of hundreds."""
    lengths = STEPS.get(step) or [(n, 1) for n in (9_000, *range(1, 2000, 21))]
    assert run(make(lengths, block_size=32), heads) < BFLOAT16_ERROR


@pytest.mark.parametrize("head_dim", [256, 64])
def test_decodes_of_other_head_dims(head_dim: int) -> None:
    shape = Shape(8, head_dim, 32, 300, torch.bfloat16, device="cuda")
    assert run(make_case(1, shape, DECODES), 32) < BFLOAT16_ERROR


def test_first_and_last_layer() -> None:
    for layer in (0, 2):
        assert run(make(STEPS["mixed"], layer=layer), 32, layer=layer) < BFLOAT16_ERROR


def test_writes_its_slots_and_no_others() -> None:
    case = make(STEPS["mixed"])
    before = case.pool.clone()
    run(case, 32)
    slots = case.batch.slots
    block, offset = slots // 16, slots % 16
    written = torch.stack((case.new(case.keys), case.new(case.values)), 2)
    assert torch.equal(case.pool[block, :, 1, :, offset], written)
    before[block, :, 1, :, offset] = written
    assert torch.equal(case.pool, before)


def test_a_padded_bucket_in_a_cuda_graph() -> None:
    """One graph, replayed for batches of other sizes, lengths and blocks; one step ahead."""
    bucket, width, heads, scale = 16, 300, 32, 128**-0.5
    steps = [
        [(n, 1) for n in (700, 5, 1500)],
        [(n, 1) for n in range(0, 1600, 100)],
        [(4000, 1)],
        [(n, 1) for n in (31, 32, 33, 1000, 2000)],
    ]
    cases = [make(step) for step in steps]
    blocks = max(case.pool.shape[0] for case in cases)
    pool = torch.zeros(blocks, *cases[0].pool.shape[1:], dtype=torch.bfloat16, device="cuda")
    backend = FlashInferAttention(
        pool,
        heads,
        torch.bfloat16,
    )
    query = torch.zeros(bucket, heads, 128, dtype=torch.bfloat16, device="cuda")
    key, value = torch.zeros(2, bucket, 8, 128, dtype=torch.bfloat16, device="cuda")
    static = pad(cases[0].batch, bucket, width)

    def fill(case: Case) -> None:
        count = case.batch.num_decodes
        pool.zero_()
        pool[: case.pool.shape[0]] = case.pool
        for target, source in (
            (query, case.query(heads)),
            (key, case.new(case.keys)),
            (value, case.new(case.values)),
        ):
            target[:count] = source
        padded = pad(case.batch, bucket, width)
        static.positions.copy_(padded.positions)
        static.slots.copy_(padded.slots)
        static.block_tables.copy_(padded.block_tables)
        static.query_lens, static.context_lens = padded.query_lens, padded.context_lens
        static.num_decodes = count

    def forward() -> torch.Tensor:
        return backend.forward(1, query, key, value, scale=scale)

    fill(cases[0])
    backend.plan(static)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        forward()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = forward()
    results: list[torch.Tensor] = []
    ends: list[torch.cuda.Event] = []
    for case in cases:  # planned while the step before may still run, as the engine does
        fill(case)
        if len(ends) > 1:
            ends[-2].synchronize()
        backend.plan(static)
        graph.replay()
        results.append(result.clone())
        ends.append(torch.cuda.Event())
        ends[-1].record()
    for case, got in zip(cases, results, strict=True):
        count = case.batch.num_decodes
        want = definition(case, case.query(heads), scale, None)
        assert error(got[:count], want) < BFLOAT16_ERROR


ROOMS = (1792, 640)  # the largest first, as the engine does
MIXED = [
    (1792, [*DECODES, *WHOLE]),
    (640, [(300, 1), (0, 3)]),
    (1792, [(n, 1) for n in range(0, 2000, 60)]),
    (640, [*DECODES, *LATER]),
    (1792, [(0, 1792)]),
    (640, [(4000, 1)]),
    (1792, [*DECODES[::-1], *LATER, (100, 7)]),
    (640, [(0, 10)] * 64),
    (640, [(3600, 640)]),
    (1792, [(2500, 1700)]),
]


def over_padding(room: int, block_size: int, limits: StepLimits) -> Batch:
    """What a graph of a mixed step is recorded with."""
    return Batch(
        tokens=torch.zeros(room, dtype=torch.int64, device="cuda"),
        positions=torch.zeros(room, dtype=torch.int64, device="cuda"),
        slots=torch.full((room,), -1, device="cuda"),
        block_tables=torch.zeros(1, room // block_size, dtype=torch.int32, device="cuda"),
        query_lens=[room],
        context_lens=[room],
        logits_rows=torch.arange(0, device="cuda"),
        num_decodes=0,
        limits=limits,
    )


def counted_plans(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each call of FlashInfer's own `plan` was of."""
    wrapper, rows = flashinfer.BatchPrefillWithPagedKVCacheWrapper, []
    plan = wrapper.plan

    def counted(self: object, queries: torch.Tensor, *args: object, **kwargs: object) -> None:
        rows.append(int(queries[-1]))
        plan(self, queries, *args, **kwargs)

    monkeypatch.setattr(wrapper, "plan", counted)
    return rows


@pytest.mark.parametrize(
    ("head_dim", "block_size", "window", "kernels", "kv_dtype"),
    # Heads of 256 first: compiling their kernels takes longest.
    [
        (256, 32, None, "auto", None),
        (128, 32, None, "auto", None),
        (128, 16, 100, "auto", None),
        (64, 32, None, "auto", None),
        (128, 32, None, "fa2", None),
        (128, 16, 100, "fa2", None),
        (64, 32, None, "fa2", None),
        pytest.param(128, 32, None, "auto", torch.float8_e4m3fn, marks=needs_fp8),
    ],
)
def test_mixed_steps_in_cuda_graphs(
    head_dim: int,
    block_size: int,
    window: int | None,
    kernels: str,
    kv_dtype: torch.dtype | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Graphs of two sizes, recorded over padding; then steps of all kinds, planned one ahead."""
    planned = counted_plans(monkeypatch)
    heads, layer, scale = 32, 1, head_dim**-0.5
    limits = StepLimits(tokens=ROOMS[0], decodes=64, chunks=64, width=4352 // block_size)
    shape = Shape(8, head_dim, block_size, dtype=torch.bfloat16, kv_dtype=kv_dtype, device="cuda")
    pool = torch.zeros(
        (40_000 // block_size, 8, 3, 2, block_size, head_dim),
        dtype=kv_dtype or torch.bfloat16,
        device="cuda",
    )
    options = FlashInferOptions(prefill=kernels)
    backend = FlashInferAttention(pool, heads, torch.bfloat16, options, windows=(window,))
    assert backend.captures_prompts
    graphs = {}
    for room in ROOMS:
        query, result = torch.zeros(2, room, heads, head_dim, dtype=torch.bfloat16, device="cuda")
        key = torch.zeros(room, 8, head_dim, dtype=torch.bfloat16, device="cuda")
        static = over_padding(room, block_size, limits)
        backend.plan(static)
        graph = torch.cuda.CUDAGraph()
        call = {"scale": scale, "sliding_window": window, "written": True, "out": result}
        backend.forward(layer, query, key, key, **call)
        with torch.cuda.graph(graph):
            backend.forward(layer, query, key, key, **call)
        graphs[room] = graph, static, query, result
    found: list[tuple[Case, torch.Tensor]] = []
    ends: list[torch.cuda.Event] = []
    for room, step in MIXED:
        graph, static, query, result = graphs[room]
        blocks = sum(-(-(before + new) // block_size) for before, new in step)
        case = make_case(layer, replace(shape, num_blocks=blocks), step)
        write(case.new(case.keys), case.new(case.values), case.batch.slots, case.pool, layer)
        pool[:blocks] = case.pool
        count = len(case.batch.tokens)
        query[:count] = case.query(heads)
        static.positions[:count] = case.batch.positions
        static = replace(
            case.batch, tokens=static.tokens, positions=static.positions, limits=limits
        )
        result.fill_(math.nan)
        if len(ends) > 1:
            ends[-2].synchronize()
        backend.plan(static)
        graph.replay()
        found.append((case, result.clone()))
        ends.append(torch.cuda.Event())
        ends[-1].record()
    for case, got in found:
        count = len(case.batch.tokens)
        want = definition(case, case.query(heads), scale, window)
        assert error(got[:count], want) < (FP8_ERROR if kv_dtype else BFLOAT16_ERROR)
        assert got[count:].isnan().all(), "padding was written"
    assert planned == list(ROOMS), "quick_call.py does not find what it looks for in FlashInfer"
