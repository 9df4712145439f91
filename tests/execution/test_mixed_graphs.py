"""Steps with prompts in graphs: a real model and attention, a recorder that computes again."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from engine_fakes import Rig, spec
from recording import Recorder
from support.models import VOCAB_SIZE, save_tiny_model

from tasuki.attention.batch import Batch
from tasuki.attention.sdpa import SdpaAttention
from tasuki.engine.api import RequestSpec
from tasuki.engine.config import EngineConfig
from tasuki.engine.engine import Engine
from tasuki.execution import mixed_graphs
from tasuki.execution.collective import ALONE
from tasuki.execution.mixed_graphs import MixedGraphs, rooms_up_to
from tasuki.execution.runner import ModelRunner
from tasuki.execution.sampler import greedy
from tasuki.execution.step_arrays import Staging, StepHeader
from tasuki.models.base import CausalModel
from tasuki.models.loader import load_model

MAX_LEN = 128
BLOCK_SIZE = 4
MAX_TOKENS = 96


class PaddedSdpa(SdpaAttention):
    """Leaves padding alone, as attention on CUDA does."""

    capturable = True
    captures_prompts = True

    def __init__(self, pool: torch.Tensor) -> None:
        super().__init__(pool)
        self.planned: list[Batch] = []

    def plan(self, batch: Batch) -> None:
        self._count = count = sum(batch.query_lens)
        self.planned.append(batch)
        if batch.limits is not None:
            chunks = len(batch.query_lens) - batch.num_decodes
            assert len(batch.tokens) <= batch.limits.tokens
            assert batch.num_decodes <= batch.limits.decodes and chunks <= batch.limits.chunks
            assert max(batch.context_lens) <= batch.limits.width * BLOCK_SIZE
        assert (batch.slots[count:] == -1).all()
        slots = batch.slots[:count].clamp(min=0)  # recording: padding goes to a block of nobody's
        super().plan(replace(batch, slots=slots))

    def forward(self, layer, query, key, value, *, out=None, **options) -> torch.Tensor:  # type: ignore[no-untyped-def, override]
        n = self._count
        result = torch.full(query.shape, float("nan")) if out is None else out
        result[:n] = super().forward(layer, query[:n], key[:n], value[:n], **options)
        return result


@pytest.fixture(scope="module", params=["qwen3", "mistral-window"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CausalModel:
    folder = save_tiny_model(tmp_path_factory.mktemp("models") / request.param, request.param)
    return load_model(folder, dtype=torch.float32, device="cpu")


def make_rig(
    model: CausalModel, recorder: Recorder | None, *, overlap: bool = True
) -> tuple[Rig, PaddedSdpa]:
    config = EngineConfig(
        num_blocks=256,
        max_model_len=MAX_LEN,
        block_size=BLOCK_SIZE,
        max_batched_tokens=MAX_TOKENS,
        vocab_size=VOCAB_SIZE,
        max_running_requests=6,
        overlap=overlap,
    )
    shape = model.spec
    pool = torch.zeros(
        config.num_blocks, shape.num_kv_heads, shape.num_layers, 2, BLOCK_SIZE, shape.head_dim
    )
    attention = PaddedSdpa(pool)
    runner = ModelRunner(model, attention, pool)
    if recorder is not None:
        runner.capture(6, MAX_LEN, MAX_TOKENS, recorder)
        pool.zero_()
        attention.planned.clear()
    return Rig(Engine(config, runner), pool, model), attention  # type: ignore[arg-type]


def requests() -> list[RequestSpec]:
    crowd = [
        spec(f"r{i}", [(7 * i + j * j) % VOCAB_SIZE for j in range(5 + 23 * i)], max_tokens=14 - i)
        for i in range(5)
    ]
    crowd.append(spec("forks", range(40, 70), choices=(0, 1), temperature=1.0, max_tokens=6))
    crowd.append(spec("scored", range(100, 130), max_tokens=4, prompt_logprobs=1))
    crowd.append(spec("last", [VOCAB_SIZE - 1], max_tokens=7))
    return crowd


def test_rooms():
    assert rooms_up_to(20) == [20]
    assert rooms_up_to(100) == [32, 64, 96, 100]
    assert rooms_up_to(640) == [*range(32, 256, 32), 256, 320, 384, 448, 512, 640]


@pytest.mark.parametrize("overlap", [False, True])
def test_tokens_are_those_without_graphs(model: CausalModel, overlap: bool) -> None:
    found = []
    recorder = Recorder()
    for used in (None, recorder):
        rig, attention = make_rig(model, used, overlap=overlap)
        for request in requests():
            rig.engine.submit(request)
        rig.drain()
        found.append(
            {(r.request_id, c): rig.tokens(r.request_id, c) for r in requests() for c in r.choices}
        )
    assert found[0] == found[1]
    mixed = [batch for batch in attention.planned if batch.limits is not None]
    finished = [batch for batch in mixed if len(batch.logits_rows)]
    assert recorder.replays == len(attention.planned) + len(finished)
    assert finished
    assert any(len(batch.tokens) > sum(batch.query_lens) for batch in mixed), "no padding"
    assert any(0 < batch.num_decodes < len(batch.query_lens) for batch in mixed), "none was mixed"
    assert len({len(batch.tokens) for batch in mixed}) > 1, "one room only"
    if not overlap:
        assert rig.pool.isfinite().all()


@torch.inference_mode()
def test_the_largest_step_has_room(model: CausalModel) -> None:
    """As many decodes and prompts as may be, all of the longest context, all logits wanted."""
    shape, decodes, chunks = model.spec, 12, (MAX_TOKENS - 12) // 2
    pool = torch.zeros(32, shape.num_kv_heads, shape.num_layers, 2, BLOCK_SIZE, shape.head_dim)
    staging = Staging(torch.device("cpu"))
    graphs = MixedGraphs(
        model,  # type: ignore[arg-type]
        PaddedSdpa(pool),
        torch.zeros(decodes, dtype=torch.int64),
        ALONE,
        max_tokens=MAX_TOKENS,
        max_decodes=decodes,
        max_width=MAX_LEN // BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        groups=1,
    )
    recorder = Recorder()
    graphs.capture(staging, recorder)
    step = StepHeader(
        query_lens=[1] * decodes + [2] * chunks,
        context_lens=[MAX_LEN] * (decodes + chunks),
        num_decodes=decodes,
        width=MAX_LEN // BLOCK_SIZE,
        wanted=MAX_TOKENS,
    )
    step = replace(step, room=graphs.room_for(step))
    assert step.room == MAX_TOKENS
    tokens, sources, positions, slots, tables, rows = staging.take(*step.parts())
    for array, value in ((tokens, 1), (sources, -1), (positions, 0), (slots, 0), (tables, 0)):
        array[:] = value
    rows[:] = range(MAX_TOKENS)
    outputs = graphs.run(step, staging)
    assert outputs is not None
    logits, best = outputs
    assert logits.shape == (MAX_TOKENS, VOCAB_SIZE) and logits.isfinite().all()
    assert torch.equal(best, greedy(logits))
    assert recorder.replays == 1, "more rows than the largest bucket has were in a graph"
    assert graphs.room_for(replace(step, num_decodes=decodes + 1)) is None
    assert graphs.room_for(replace(step, query_lens=[*step.query_lens, 1], room=None)) is None


def test_a_step_larger_than_every_room_runs_as_before(model: CausalModel) -> None:
    found = []
    for recorder in (None, Recorder()):
        rig, attention = make_rig(model, recorder)
        larger = replace(rig.engine.config, max_batched_tokens=2 * MAX_TOKENS)
        rig.engine._scheduler._config = larger
        for i in range(2):
            rig.engine.submit(spec(f"r{i}", range(60 + i, 160 + i), max_tokens=8))
        rig.drain()
        first = attention.planned[0]
        assert len(first.tokens) == sum(first.query_lens) > MAX_TOKENS
        assert first.limits is None
        found.append([rig.tokens("r0"), rig.tokens("r1")])
    assert found[0] == found[1]


def test_a_step_of_more_prompts_than_plans_lay_out_runs_as_before(
    model: CausalModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mixed_graphs, "_MAX_CHUNKS", 3)
    found = []
    for recorder in (None, Recorder()):
        rig, attention = make_rig(model, recorder)
        for i in range(5):
            rig.engine.submit(spec(f"r{i}", range(9 * i, 9 * i + 7), max_tokens=5))
        rig.engine.submit(spec("later", range(50, 60), max_tokens=5))
        rig.drain()
        assert attention.planned[0].limits is None
        assert recorder is None or all(
            batch.limits or batch.bucket for batch in attention.planned[1:]
        )
        found.append([rig.tokens(f"r{i}") for i in range(5)])
    assert found[0] == found[1]


def test_a_step_without_prompts_that_is_no_plain_decode(model: CausalModel) -> None:
    """A prompt of one token with two choices: its only row gives two draws."""
    found = []
    for recorder in (None, Recorder()):
        rig, attention = make_rig(model, recorder)
        rig.engine.submit(spec("r", [7], choices=(0, 1), temperature=1.0, max_tokens=6))
        rig.drain()
        first = attention.planned[0]
        assert first.num_decodes == len(first.query_lens) == 1
        assert (first.limits is not None) == (recorder is not None)
        found.append([rig.tokens("r", choice) for choice in (0, 1)])
    assert found[0] == found[1]


def test_attention_that_looks_at_the_batch_runs_such_steps_without_graphs(
    model: CausalModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PaddedSdpa, "captures_prompts", False)
    recorder = Recorder()
    rig, attention = make_rig(model, recorder)
    rig.engine.submit(spec("r", range(30), max_tokens=8))
    rig.drain()
    assert [batch.limits for batch in attention.planned] == [None] * len(attention.planned)
    assert recorder.replays == sum(batch.bucket is not None for batch in attention.planned) == 7
