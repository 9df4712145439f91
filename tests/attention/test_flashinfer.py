"""What the FlashInfer backend plans and calls, with FlashInfer's part computed on the CPU.

In float16, not bfloat16: decodes run in Triton's interpreter, whose GEMMs know no such type.

The kernels themselves are tested on a GPU, in tests/gpu/test_attention.py.
"""

from __future__ import annotations

import importlib
import sys
import threading
from dataclasses import dataclass, replace
from types import ModuleType, SimpleNamespace

import fake_flashinfer
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from support.attention_cases import STEPS, Case, Shape, definition, make_case, pad
from support.kernels import DEVICE

from tasuki.attention.batch import Batch, StepLimits
from tasuki.attention.errors import AttentionError
from tasuki.attention.write import write

HEADS, SCALE = 6, 0.3
SHAPE = Shape(2, head_dim=64, dtype=torch.float16)

pytestmark = pytest.mark.skipif(
    DEVICE.type == "cuda", reason="the real FlashInfer is tested in tests/gpu"
)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """attention/flashinfer.py over the fake library; forgotten after the test."""
    names = ("tasuki.attention.flashinfer_kernels", "tasuki.attention.flashinfer")
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer)
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    kernels, loaded = (importlib.import_module(name) for name in names)
    loaded.kernels = kernels  # type: ignore[attr-defined]
    for name in names:
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
        case.pool, HEADS, torch.float16, module.kernels.FlashInferOptions(**options)
    )
    backend.plan(case.batch)
    assert_right(case, query, case.run(backend, 1, query, scale=SCALE, window=window), window)


def test_fp8_cache(module: ModuleType) -> None:
    shape = Shape(2, head_dim=64, dtype=torch.float16, kv_dtype=torch.float8_e4m3fn)
    case = make_case(1, shape, STEPS["uneven decodes"])
    # What fp8 has exactly: the interpreter does not round as the device does.
    for sequences in (case.keys, case.values):
        sequences[:] = [s.to(torch.float8_e4m3fn).to(torch.float16) for s in sequences]
    query = case.query(HEADS)
    backend = module.FlashInferAttention(case.pool, HEADS, torch.float16)
    backend.plan(case.batch)
    assert_right(case, query, case.run(backend, 1, query, scale=SCALE), None)


def test_steps_one_after_another_and_layers_of_two_kinds(module: ModuleType) -> None:
    backend = None
    for step in ("uneven decodes", "all mixed", "whole prompts", "uneven decodes"):
        case = make_case(1, SHAPE, STEPS[step])
        if backend is None:
            pool = case.pool
            backend = module.FlashInferAttention(pool, HEADS, torch.float16)
        pool.copy_(case.pool)
        backend.plan(case.batch)
        query = case.query(HEADS)
        for window in (None, 5):
            assert_right(
                case, query, case.run(backend, 1, query, scale=SCALE, window=window), window
            )


def test_a_step_in_flight_may_still_read_what_was_planned_before(module: ModuleType) -> None:
    case = make_case(1, SHAPE, STEPS["later chunk"])
    backend = module.FlashInferAttention(case.pool, HEADS, torch.float16)
    for _ in range(2):
        backend.plan(case.batch)
        case.run(backend, 1, case.query(HEADS), scale=SCALE)
    [kind] = backend._kinds.values()
    pinned = kind.call.wrapper.pinned
    assert len(pinned) == 2 and pinned[0] != pinned[1]


@pytest.mark.parametrize("kernels", ["auto", "fa2"])
@pytest.mark.parametrize("window", [None, 5])
def test_a_graph_of_mixed_steps_finds_what_later_plans_leave(
    module: ModuleType, window: int | None, kernels: str
) -> None:
    """Recorded over padding; replayed with any number of decodes and prompts, or none."""
    room, limits = 40, StepLimits(tokens=64, decodes=8, chunks=4, width=9)
    layer, last = 1, STEPS["all mixed"]
    steps = [*STEPS.values(), [(21, 1)] * 7, [(30, 5), (0, 9), (0, 3), (16, 18)], last]
    pool = make_case(layer, SHAPE, last).pool
    options = module.kernels.FlashInferOptions(prefill=kernels)
    backend = module.FlashInferAttention(pool, HEADS, torch.float16, options)
    query = torch.zeros(room, HEADS, 64, dtype=torch.float16)
    key = value = torch.zeros(room, 2, 64, dtype=torch.float16)
    result = torch.zeros_like(query)

    def recording(tokens: int) -> Batch:
        return Batch(
            tokens=torch.zeros(tokens, dtype=torch.int64),
            positions=torch.zeros(tokens, dtype=torch.int64),
            slots=torch.full((tokens,), -1),
            block_tables=torch.zeros(1, -(-tokens // 4), dtype=torch.int32),
            query_lens=[tokens],
            context_lens=[tokens],
            logits_rows=torch.arange(0),
            num_decodes=0,
            limits=limits,
        )

    def forward(out: torch.Tensor) -> None:
        count = len(out)
        options = {"scale": SCALE, "sliding_window": window, "written": True, "out": out}
        backend.forward(layer, query[:count], key[:count], value[:count], **options)

    backend.plan(recording(limits.tokens))
    query = torch.zeros(limits.tokens, HEADS, 64, dtype=torch.float16)
    forward(torch.zeros_like(query))  # learns of the kind of layer, as the largest room's first run
    backend.plan(recording(room))
    query = query[:room].clone()
    forward(result)
    [kind] = backend._kinds.values()
    recorded, wrapper = kind.decodes, kind.call.wrapper
    for step in steps:
        case = make_case(layer, SHAPE, step)
        write(case.new(case.keys), case.new(case.values), case.batch.slots, case.pool, layer)
        pool.copy_(case.pool)
        count = len(case.batch.tokens)
        query[:count] = case.query(HEADS)
        padded = F.pad(case.batch.positions, (0, room - count))
        backend.plan(replace(case.batch, tokens=torch.zeros(room), positions=padded, limits=limits))
        result.fill_(float("nan"))
        calls = [
            lambda: backend._decode.forward(recorded, layer, query, SCALE, result),
            lambda: wrapper.replay(query, backend._layers[layer], result),
        ]
        for call in reversed(calls) if kernels == "fa2" else calls:  # in the order of `forward`
            call()
        assert_right(case, case.query(HEADS), result[:count], window)
        assert result[count:].isnan().all()
    assert kind.call.wrapper is wrapper
    assert wrapper.plans == 2  # of the largest and of the room; the others only divide the work
    assert len(wrapper.pinned) == 2 + len(steps)


def test_padding_writes_nothing(module: ModuleType) -> None:
    case = make_case(1, SHAPE, [(5, 1)], garbage=3.0)
    before = case.pool.clone()
    backend = module.FlashInferAttention(case.pool, HEADS, torch.float16)
    backend.plan(pad(case.batch, 4, 8))
    one = torch.ones(4, 2, 64, dtype=torch.float16)
    backend.forward(1, torch.ones(4, HEADS, 64, dtype=torch.float16), one, one, scale=SCALE)
    written = (case.pool != before).nonzero()
    slot = int(case.batch.slots[0])
    assert {(int(w[0]), int(w[4])) for w in written} == {(slot // 4, slot % 4)}


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

    monkeypatch.setattr(fake_flashinfer, "BatchPrefillWithPagedKVCacheWrapper", Other)
    case = make_case(1, SHAPE, STEPS["later chunk"])
    with pytest.raises(AttentionError, match="has no _int_workspace_buffer"):
        module.FlashInferAttention(case.pool, HEADS, torch.float16)


@pytest.mark.parametrize(
    ("version", "known"),
    [
        ("0.6.13", False),
        ("0.6.14", True),
        ("0.6.20.post1", True),
        ("0.7.0rc1", False),
        ("1.0", False),
        ("?", False),
    ],
)
def test_versions_whose_private_parts_are_unknown_are_refused(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, version: str, known: bool
) -> None:
    monkeypatch.setattr(fake_flashinfer, "__version__", version)
    reason = module.kernels.why_not(HEADS, 2, 64, torch.float16, torch.float16)
    assert (reason is None) == known
    assert known or f"FlashInfer is {version}" in reason


@dataclass
class _Spec:
    """Of a kernel; `built` names those that were, once all of them had begun to be."""

    name: str
    is_compiled: bool
    begun: threading.Barrier
    built: list[str]
    is_aot: bool = False

    def build(self, verbose: bool) -> None:
        self.begun.wait(timeout=10)
        self.built.append(self.name)


@pytest.mark.parametrize("done", [False, True])
def test_compiles_what_is_missing_at_once(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, done: bool
) -> None:
    built: list[str] = []
    together = threading.Barrier(4)

    def prefill(backend: str, *args: object) -> _Spec:
        assert len(args) == 10
        return _Spec(f"{backend} {str(args[1])[6:]} {args[7]}", done, together, built)

    jit = SimpleNamespace(gen_batch_prefill_module=prefill)
    utils = SimpleNamespace(
        determine_attention_backend=lambda *args: "fa3" if args[4] == args[5] else "fa2"
    )
    monkeypatch.setattr(fake_flashinfer, "jit", jit, raising=False)
    monkeypatch.setattr(fake_flashinfer, "utils", utils, raising=False)
    fp8 = replace(SHAPE, kv_dtype=torch.float8_e4m3fn)
    backend = module.FlashInferAttention(make_case(0, fp8, [(0, 1)]).pool, HEADS, torch.float16)
    backend._kernels.compile({False, True})
    names = [f"{n} {w}" for w in (False, True) for n in _fp8_kernels()]
    assert sorted(built) == ([] if done else sorted(names))


def _fp8_kernels() -> tuple[str, ...]:
    """Chunks from the cache; whole prompts from the step."""
    return "fa2 float8_e4m3fn", "fa3 float16"
