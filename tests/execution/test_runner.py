"""The batch that a plan becomes."""

from __future__ import annotations

from array import array

import pytest
import torch
from engine_fakes import NoAttention, Shape

from tasuki.attention.batch import Batch
from tasuki.engine.api import Leg, RequestSpec, SamplingParams
from tasuki.engine.cache_groups import BlockTable
from tasuki.engine.plan import Row, StepPlan
from tasuki.engine.request import Request, SequenceState
from tasuki.execution.runner import ModelRunner


class Recorder:
    """A model that keeps what it was given."""

    spec = Shape()

    def forward(self, batch: Batch, attention: object) -> torch.Tensor:
        self.batch = batch
        return torch.zeros(len(batch.logits_rows), 8)


def sequence(tokens, computed: int, blocks, **params) -> SequenceState:
    sampling = SamplingParams(seed=0, max_tokens=9, temperature=0.0, **params)
    spec = RequestSpec("r", Leg.COLOCATED, tokens, sampling)
    found = Request(spec, 0, b"", 0.0).sequences[0]
    found.computed = computed
    found.tables = [BlockTable(0, array("i", blocks))]
    return found


def run(plan: StepPlan) -> tuple[Batch, torch.Tensor, object]:
    pool = torch.arange(10.0)[:, None, None, None, None, None].repeat(1, 1, 1, 2, 4, 1)
    model = Recorder()
    runner = ModelRunner(model, NoAttention(), pool)  # type: ignore[arg-type]
    outcome = runner.collect(runner.launch(plan))
    return model.batch, pool, outcome


def row(sequence: SequenceState, tokens: int) -> Row:
    return Row(sequence, tokens, sequence.computed, sequence.epoch)


def test_decodes_and_chunks_in_one_batch():
    decode = sequence(range(10, 16), 5, [3, 1])
    ends = sequence(range(20, 29), 2, [2, 4, 6])
    goes_on = sequence(range(30, 39), 0, [5, 7, 8])
    plan = StepPlan(rows=[row(decode, 1), row(ends, 7), row(goes_on, 3)], num_decodes=1)
    batch, _, outcome = run(plan)
    assert batch.tokens.tolist() == [15, *range(22, 29), 30, 31, 32]
    assert batch.positions.tolist() == [5, *range(2, 9), 0, 1, 2]
    assert batch.slots.tolist() == [5, 10, 11, 16, 17, 18, 19, 24, 20, 21, 22]
    assert batch.block_tables.tolist() == [[3, 1, 3], [2, 4, 6], [5, 7, 8]]
    assert (batch.query_lens, batch.context_lens) == ([1, 7, 3], [6, 9, 3])
    assert batch.logits_rows.tolist() == [0, 7]
    assert batch.num_decodes == 1
    assert (batch.tokens.dtype, batch.block_tables.dtype) == (torch.int64, torch.int32)
    assert [draw.sequence for draw in outcome.draws] == [decode, ends]


def test_blocks_are_copied_before_the_model_runs():
    plan = StepPlan(rows=[row(sequence([1], 0, [9]), 1)], num_decodes=1, copies=[(2, 5), (2, 6)])
    _, pool, _ = run(plan)
    assert pool[:, 0, 0, 0, 0, 0].tolist() == [0, 1, 2, 3, 4, 2, 2, 7, 8, 9]


def test_plan_without_samples_reads_nothing_back():
    batch, _, outcome = run(StepPlan(rows=[row(sequence(range(8), 0, [1, 2]), 5)]))
    assert batch.logits_rows.tolist() == []
    assert outcome.tokens == []


def test_prompt_logprobs_want_every_row_but_the_prompts_last():
    scored = sequence(range(6), 0, [1, 2], prompt_logprobs=0)
    batch, _, outcome = run(StepPlan(rows=[row(scored, 6)]))
    assert batch.logits_rows.tolist() == [0, 1, 2, 3, 4, 5]
    [(owner, entries)] = outcome.prompt_logprobs
    assert owner is scored
    assert [entry.token for entry in entries] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_scrub_zeroes_blocks(dtype: torch.dtype):
    pool = torch.ones(4, 1, 1, 2, 4, 1).to(dtype)
    ModelRunner(Recorder(), None, pool).scrub([1, 3])  # type: ignore[arg-type]
    assert pool.float().sum(dim=(1, 2, 3, 4, 5)).tolist() == [8, 0, 8, 0]
