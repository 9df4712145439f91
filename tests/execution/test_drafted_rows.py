"""Rows with drafts on a real model in float32: tokens and log-probabilities as without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_fakes import Rig, spec
from support.models import VOCAB_SIZE, save_tiny_model

from tasuki.engine import drafts
from tasuki.engine.config import EngineConfig
from tasuki.engine.engine import Engine
from tasuki.engine.plan import Row, StepPlan
from tasuki.engine.request import Request
from tasuki.engine.stats import StepRates
from tasuki.execution.inputs import wanted_logits
from tasuki.execution.runner import ModelRunner
from tasuki.kv.layout import CacheLayout
from tasuki.models.attending import attention_for
from tasuki.models.base import CausalModel
from tasuki.models.loader import load_model

BLOCK_SIZE = 8
BLOCKS = 200


@pytest.fixture(scope="module", params=["llama", "mistral-window"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CausalModel:
    folder = save_tiny_model(tmp_path_factory.mktemp("models") / request.param, request.param)
    return load_model(folder, dtype=torch.float32, device="cpu")


def make_rig(model: CausalModel, draft_tokens: int) -> Rig:
    shape = model.spec
    layout = CacheLayout(
        BLOCKS, shape.num_kv_heads, shape.num_layers, BLOCK_SIZE, shape.head_dim, torch.float32
    )
    pool = layout.allocate("cpu")
    attention, _ = attention_for(model, pool, torch.float32)
    config = EngineConfig(
        num_blocks=BLOCKS,
        max_model_len=256,
        block_size=BLOCK_SIZE,
        vocab_size=VOCAB_SIZE,
        max_running_requests=6,
        draft_tokens=draft_tokens,
    )
    return Rig(Engine(config, ModelRunner(model, attention, pool)), pool, model)  # type: ignore[arg-type]


def test_tokens_are_those_without_drafts(
    model: CausalModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StepRates, "decode_s", lambda *_: 1e9)  # all drafts are worth it
    extras: list[dict[str, Any]] = [
        {},
        {"logit_bias": {5: 100.0, 6: 99.0}, "temperature": 1.0},  # repeats itself
        {"logprobs": 3},
        {"temperature": 0.3, "logprobs": 0},
    ]
    told = []
    for draft_tokens in (0, 6):
        rig = make_rig(model, draft_tokens)
        for index, extra in enumerate(extras):
            prompt = [7 + index, 8, 9, 10, 11] * 6
            rig.engine.submit(spec(f"r{index}", prompt, max_tokens=60, seed=index, **extra))
        rig.drain()
        names = [f"r{index}" for index in range(len(extras))]
        entries = [e for name in names for o in rig.outputs[name, 0] for e in o.logprobs or []]
        told.append(([rig.tokens(name) for name in names], entries))
    counters = rig.engine.counters()
    assert 0 < counters.accepted_draft_tokens < counters.draft_tokens
    (tokens, entries), (drafted, drafted_entries) = told
    assert drafted == tokens
    assert [e.token for e in drafted_entries] == [e.token for e in entries]
    for mine, other in zip(drafted_entries, entries, strict=True):
        assert mine.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_drafts_whose_kv_is_not_finite_change_no_token(
    model: CausalModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is masked spoils an attention all the same, in the step itself and afterwards."""
    monkeypatch.setattr(StepRates, "decode_s", lambda *_: 1e9)  # all drafts are worth it
    prompts = [[7, 8, 9, 10, 11], [12, 13] * 9]
    poison = -1
    monkeypatch.setattr(drafts, "lookup", lambda _, count: [poison] * count)

    def answers(rig: Rig) -> list[list[int]]:
        for index, prompt in enumerate(prompts):
            rig.engine.submit(spec(f"r{index}", prompt, max_tokens=20 + index))
        rig.drain()
        assert [end.message for end in rig.ended.values()] == ["", ""]
        return [rig.tokens(f"r{index}") for index in range(len(prompts))]

    plain = answers(make_rig(model, 0))
    used = {token for tokens in (*prompts, *plain) for token in tokens}
    poison = next(token for token in range(VOCAB_SIZE) if token not in used)
    rig = make_rig(model, 6)
    with torch.inference_mode():
        row = model._weights.embedding[poison]  # type: ignore[attr-defined]
        kept = row.clone()
        row.fill_(float("nan"))
        try:
            drafted = answers(rig)
        finally:
            row.copy_(kept)
    assert drafted == plain
    counters = rig.engine.counters()
    assert counters.draft_tokens > 0 and counters.accepted_draft_tokens == 0
    assert rig.pool.isfinite().all(), "nothing of them is left"


def test_each_position_of_a_drafted_row_is_drawn() -> None:
    sequence = Request(spec("a", range(9), choices=(2,)), 0, b"", 0.0).sequences[0]
    sequence.tokens.append(3)
    other = Request(spec("b", range(4)), 1, b"", 0.0).sequences[0]
    rows = [Row(other, 4, 0, 0), Row(sequence, 3, 9, 0, draft=[5, 6])]
    wanted = wanted_logits(StepPlan(rows))
    assert list(wanted.rows) == [3, 4, 5, 6]
    drawn = [(draw.choice, draw.position, draw.drafted) for draw in wanted.draws]
    assert drawn == [(0, 0, False), (2, 1, True), (2, 2, True), (2, 3, True)]
    assert not wanted.decodes
