"""What the FlashInfer backend plans and calls, with FlashInfer's part computed on the CPU.

The kernels themselves are tested on a GPU, in tests/gpu/test_attention.py.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass, replace
from types import ModuleType, SimpleNamespace

import fake_flashinfer
import pytest
import torch
from support.attention_cases import STEPS, Case, Shape, definition, make_case, pad
from support.kernels import DEVICE

from tasuki.attention.errors import AttentionError

HEADS, SCALE = 6, 0.3
SHAPE = Shape(2, head_dim=64, dtype=torch.bfloat16)

pytestmark = pytest.mark.skipif(
    DEVICE.type == "cuda", reason="the real FlashInfer is tested in tests/gpu"
)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """attention/flashinfer.py over the fake library; forgotten after the test."""
    name = "tasuki.attention.flashinfer"
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer)
    monkeypatch.setitem(sys.modules, "flashinfer.decode", fake_flashinfer)
    monkeypatch.delitem(sys.modules, name, raising=False)
    loaded = importlib.import_module(name)
    monkeypatch.delitem(sys.modules, name)
    return loaded


def assert_right(case: Case, query: torch.Tensor, got: torch.Tensor, window: int | None) -> None:
    want = definition(case, query, SCALE, window)
    torch.testing.assert_close(got.double(), want, atol=0.01, rtol=0.01)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(
    "options", [{}, {"ragged": False}, {"joint": True}], ids=["default", "paged", "joint"]
)
@pytest.mark.parametrize("step", STEPS)
def test_every_kind_of_step(
    module: ModuleType, step: str, options: dict[str, bool], window: int | None
) -> None:
    case = make_case(1, SHAPE, STEPS[step])
    query = case.query(HEADS)
    backend = module.FlashInferAttention(
        case.pool, HEADS, torch.bfloat16, module.FlashInferOptions(**options)
    )
    backend.plan(case.batch)
    assert_right(case, query, case.run(backend, 1, query, scale=SCALE, window=window), window)


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("step", STEPS)
def test_every_kind_of_step_with_our_own_decodes(
    module: ModuleType, step: str, joint: bool
) -> None:
    """In float16: the interpreter's products know no bfloat16."""
    case = make_case(1, replace(SHAPE, dtype=torch.float16), STEPS[step])
    query = case.query(HEADS)
    backend = module.FlashInferAttention(
        case.pool, HEADS, torch.float16, module.FlashInferOptions(own_decode=True, joint=joint)
    )
    backend.plan(case.batch)
    for window in (None, 5):
        got = case.run(backend, 1, query, scale=SCALE, window=window)
        assert_right(case, query, got, window)


def test_fp8_cache(module: ModuleType) -> None:
    shape = Shape(2, head_dim=64, dtype=torch.bfloat16, kv_dtype=torch.float8_e4m3fn)
    case = make_case(1, shape, STEPS["uneven decodes"])
    # What fp8 has exactly: the interpreter does not round as the device does.
    for sequences in (case.keys, case.values):
        sequences[:] = [s.to(torch.float8_e4m3fn).to(torch.bfloat16) for s in sequences]
    query = case.query(HEADS)
    backend = module.FlashInferAttention(case.pool, HEADS, torch.bfloat16)
    backend.plan(case.batch)
    assert_right(case, query, case.run(backend, 1, query, scale=SCALE), None)


def test_steps_one_after_another_and_layers_of_two_kinds(module: ModuleType) -> None:
    backend = None
    for step in ("uneven decodes", "all mixed", "whole prompts", "uneven decodes"):
        case = make_case(1, SHAPE, STEPS[step])
        if backend is None:
            pool = case.pool
            backend = module.FlashInferAttention(pool, HEADS, torch.bfloat16)
        pool.copy_(case.pool)
        backend.plan(case.batch)
        query = case.query(HEADS)
        for window in (None, 5):
            assert_right(
                case, query, case.run(backend, 1, query, scale=SCALE, window=window), window
            )


class _Graph:
    """What a CUDA graph would do: the wrappers as they were, on whatever their buffers hold."""

    def __init__(self, backend: object, layer: int) -> None:
        [kind] = backend._kinds.values()  # type: ignore[attr-defined]
        [(_, call)] = kind.calls
        self.wrapper = call.wrapper
        self._cache = backend._layers[layer]  # type: ignore[attr-defined]

    def replay(self, query: torch.Tensor) -> torch.Tensor:
        return self.wrapper.run(query, self._cache, out=torch.empty_like(query))


def test_a_graph_reads_what_later_plans_of_its_bucket_write(module: ModuleType) -> None:
    bucket, width = 8, 12
    first = make_case(1, SHAPE, [(22, 1), (5, 1), (13, 1)])
    backend = module.FlashInferAttention(first.pool, HEADS, torch.bfloat16)
    backend.plan(pad(first.batch, bucket, width))
    query = torch.zeros(bucket, HEADS, 64, dtype=torch.bfloat16)
    query[:3] = first.query(HEADS)
    rows = [torch.zeros(bucket, 2, 64, dtype=torch.bfloat16) for _ in range(2)]
    for row, sequences in zip(rows, (first.keys, first.values), strict=True):
        row[:3] = first.new(sequences)
    got = backend.forward(1, query, *rows, scale=SCALE)
    assert_right(first, query[:3], got[:3], None)
    graph = _Graph(backend, 1)

    other = make_case(1, SHAPE, [(0, 1), (30, 1), (9, 1), (2, 1), (41, 1)])
    first.pool.copy_(other.pool)
    later = pad(other.batch, bucket, width)
    backend.plan(later)
    module.write(other.new(other.keys), other.new(other.values), later.slots[:5], first.pool, 1)
    query = torch.zeros(bucket, HEADS, 64, dtype=torch.bfloat16)
    query[:5] = other.query(HEADS)
    assert_right(other, query[:5], graph.replay(query)[:5], None)

    pinned = graph.wrapper.pinned
    assert len(pinned) == 2 and pinned[0] != pinned[1], "a step in flight may still read the first"


def test_padding_writes_nothing(module: ModuleType) -> None:
    case = make_case(1, SHAPE, [(5, 1)], garbage=3.0)
    before = case.pool.clone()
    backend = module.FlashInferAttention(case.pool, HEADS, torch.bfloat16)
    backend.plan(pad(case.batch, 4, 8))
    one = torch.ones(4, 2, 64, dtype=torch.bfloat16)
    backend.forward(1, torch.ones(4, HEADS, 64, dtype=torch.bfloat16), one, one, scale=SCALE)
    written = (case.pool != before).nonzero()
    slot = int(case.batch.slots[0])
    assert {(int(w[0]), int(w[4])) for w in written} == {(slot // 4, slot % 4)}


def test_wider_tables_than_the_bucket_was_planned_for(module: ModuleType) -> None:
    case = make_case(1, SHAPE, [(22, 1), (5, 1)])
    backend = module.FlashInferAttention(case.pool, HEADS, torch.bfloat16)
    backend.plan(pad(make_case(1, SHAPE, [(1, 1)]).batch, 2, 1))
    with pytest.raises(AttentionError, match="has 8 blocks, the bucket was first planned for 2"):
        backend.plan(pad(case.batch, 2, 6))


@pytest.mark.parametrize(
    ("shape", "dtype", "reason"),
    [
        (Shape(2, head_dim=64, dtype=torch.float32), torch.float32, "bfloat16 or float16"),
        (Shape(2, head_dim=96, dtype=torch.bfloat16), torch.bfloat16, "head_dim is 96"),
        (Shape(4, head_dim=64, dtype=torch.bfloat16), torch.bfloat16, "6 query heads over 4"),
        (Shape(2, head_dim=64, dtype=torch.float16), torch.bfloat16, "KV cache is torch.float16"),
    ],
)
def test_refuses_what_there_are_no_kernels_for(
    module: ModuleType, shape: Shape, dtype: torch.dtype, reason: str
) -> None:
    pool = make_case(0, shape, [(0, 1)]).pool
    with pytest.raises(AttentionError, match=reason):
        module.FlashInferAttention(pool, HEADS, dtype)


def test_another_flashinfer_is_told_at_once(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Other:
        def __init__(self, *_: object, **__: object) -> None:
            pass

    monkeypatch.setattr(fake_flashinfer, "BatchDecodeWithPagedKVCacheWrapper", Other)
    case = make_case(1, SHAPE, STEPS["one decode"])
    backend = module.FlashInferAttention(case.pool, HEADS, torch.bfloat16)
    backend.plan(case.batch)
    with pytest.raises(AttentionError, match="has no _int_workspace_buffer"):
        case.run(backend, 1, case.query(HEADS), scale=SCALE)


@dataclass
class _Spec:
    name: str
    is_compiled: bool
    is_aot: bool = False


@pytest.mark.parametrize("done", [False, True])
def test_compiles_what_is_missing_at_once(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, done: bool
) -> None:
    built: list[list[str]] = []

    def prefill(backend: str, *args: object) -> _Spec:
        assert len(args) == 10
        return _Spec(f"{backend} {str(args[1])[6:]} {args[7]}", done)

    def decode(*args: object) -> _Spec:
        assert len(args) == 9
        return _Spec(f"decode {str(args[1])[6:]} {args[7]}", done)

    jit = SimpleNamespace(
        gen_batch_prefill_module=prefill,
        gen_batch_decode_module=decode,
        build_jit_specs=lambda specs: built.append(sorted(s.name for s in specs)),
    )
    utils = SimpleNamespace(
        determine_attention_backend=lambda *args: "fa3" if args[4] == args[5] else "fa2"
    )
    monkeypatch.setattr(fake_flashinfer, "jit", jit, raising=False)
    monkeypatch.setattr(fake_flashinfer, "utils", utils, raising=False)
    fp8 = replace(SHAPE, kv_dtype=torch.float8_e4m3fn)
    backend = module.FlashInferAttention(make_case(0, fp8, [(0, 1)]).pool, HEADS, torch.bfloat16)
    backend._compile({False, True})
    names = [f"{n} {w}" for w in (False, True) for n in _fp8_kernels()]
    assert built == ([] if done else [sorted(names)])


def _fp8_kernels() -> tuple[str, ...]:
    """Plain decode (3 heads to a KV head); chunks from the cache; whole prompts from the step."""
    return "decode float8_e4m3fn", "fa2 float8_e4m3fn", "fa3 bfloat16"
