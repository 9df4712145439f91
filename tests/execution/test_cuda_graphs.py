"""Padded decode batches, with a recorder that computes instead of replaying a CUDA graph."""

from __future__ import annotations

import pytest
import torch
from engine_fakes import VOCAB, HashModel, Rig, expected, spec
from recording import Recorder

from tasuki.attention.batch import Batch
from tasuki.engine.config import EngineConfig
from tasuki.engine.engine import Engine
from tasuki.execution.cuda_graphs import buckets_up_to
from tasuki.execution.runner import ModelRunner


class PlannedAttention:
    """Keeps what a graph may not read from the batch it was recorded with."""

    def __init__(self) -> None:
        self.planned: list[Batch] = []

    def plan(self, batch: Batch) -> None:
        self.planned.append(batch)


class GraphModel(HashModel):
    """Takes tokens, positions and slots from the recorded tensors, all else from the plan."""

    def forward(self, batch: Batch, attention: PlannedAttention) -> torch.Tensor:
        planned = attention.planned[-1]
        if batch.bucket is not None:
            assert planned.bucket == batch.bucket
            assert planned.tokens is batch.tokens
            assert planned.slots.data_ptr() == batch.slots.data_ptr()
            assert (planned.slots[planned.num_decodes :] == -1).all()
            assert (planned.block_tables[planned.num_decodes :] == 0).all()
        return super().forward(planned, attention)


def make_rig(*, max_rows: int, overlap: bool) -> tuple[Rig, Recorder, PlannedAttention]:
    config = EngineConfig(
        num_blocks=128,
        max_model_len=64,
        block_size=4,
        max_batched_tokens=64,
        vocab_size=VOCAB,
        max_running_requests=max_rows,
        overlap=overlap,
    )
    pool = torch.zeros(config.num_blocks, 1, 1, 2, config.block_size, 2)
    model, attention, recorder = GraphModel(pool), PlannedAttention(), Recorder()
    runner = ModelRunner(model, attention, pool)  # type: ignore[arg-type]
    runner.capture(max_rows, config.max_model_len, recorder=recorder)
    assert not pool.any(), "recording wrote to the pool"
    assert runner.decode_rows == buckets_up_to(max_rows)
    return Rig(Engine(config, runner), pool, model), recorder, attention


def test_buckets():
    assert buckets_up_to(1) == [1]
    assert buckets_up_to(6) == [1, 2, 4, 6]
    assert buckets_up_to(64) == [1, 2, 4, 8, 16, 32, 48, 64]
    assert buckets_up_to(40) == [1, 2, 4, 8, 16, 32, 40]


@pytest.mark.parametrize("overlap", [False, True])
def test_tokens_are_those_without_graphs(overlap: bool):
    rig, recorder, attention = make_rig(max_rows=6, overlap=overlap)
    recorded = len(attention.planned)
    extras = [
        {},
        {"temperature": 0.8, "top_p": 0.9},
        {"frequency_penalty": 1.0, "repetition_penalty": 1.2},
        {"logprobs": 2, "min_tokens": 3, "stop_token_ids": frozenset(range(20))},
        {"temperature": 1.0, "logit_bias": {3: 2.0}},
    ]
    requests = [
        spec(f"r{i}", range(i, 2 * i + 5), max_tokens=9 + 3 * i, seed=i, **extra)
        for i, extra in enumerate(extras)
    ]
    requests.append(spec("forks", range(7), choices=(0, 1, 2), temperature=1.0, max_tokens=12))
    for request in requests:
        rig.engine.submit(request)
    rig.drain()
    for request in requests:
        for choice in request.choices:
            assert rig.tokens(request.request_id, choice) == expected(request, choice, 64)[0]
    steps = attention.planned[recorded:]
    in_graphs = [batch for batch in steps if batch.bucket is not None]
    assert len(in_graphs) == recorder.replays
    assert len(steps) > len(in_graphs) > 10
    assert len({batch.bucket for batch in in_graphs}) > 1
    assert any(batch.num_decodes < (batch.bucket or 0) for batch in in_graphs)


def test_a_greedy_batch_of_plain_requests():
    rig, recorder, _ = make_rig(max_rows=4, overlap=True)
    requests = [spec(f"r{i}", range(i, i + 5), max_tokens=20) for i in range(3)]
    for request in requests:
        rig.engine.submit(request)
    rig.drain()
    for request in requests:
        assert rig.tokens(request.request_id) == expected(request, 0, 64)[0]
    assert recorder.replays == 19


def test_a_row_of_a_graph_that_is_not_finite_fails_alone():
    rig, _, _ = make_rig(max_rows=4, overlap=True)
    rig.model.poison = 40
    good = spec("good", range(12), max_tokens=20, logit_bias={40: -100.0})
    rig.engine.submit(good)
    bad = spec("bad", range(9), max_tokens=20, temperature=1.0, logit_bias={40: 100.0})
    rig.engine.submit(bad)
    rig.drain()
    assert rig.tokens("good") == expected(good, 0, 64)[0]
    assert "finite" in rig.ended["bad"].message
    assert rig.pool.isfinite().all()
