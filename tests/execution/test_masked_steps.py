"""Steps with grammars: launched before their masks are made, sampled with them.

Runs on executors with and without graphs (computed again in place, as CUDA replays them), so
logits that did not stay until sampling would give other tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import engine_fakes
import pytest
import torch
from engine_fakes import NoAttention, Rig, spec
from grammar_fakes import EOS, VOCAB, regex, text_of
from recording import Recorder
from test_cuda_graphs import GraphModel, PlannedAttention

from tasuki.engine.api import LegEndReason, RequestSpec
from tasuki.engine.config import EngineConfig
from tasuki.engine.engine import Engine
from tasuki.engine.errors import GrammarError
from tasuki.engine.grammar_masks import StepMasks
from tasuki.engine.plan import StepOutcome, StepPlan
from tasuki.execution.runner import Launched, ModelRunner

PATTERN = "[a-z]{12,20}"


@pytest.fixture(autouse=True)
def words(monkeypatch: pytest.MonkeyPatch) -> None:
    """The noise has a vocabulary that spells."""
    monkeypatch.setattr(engine_fakes, "VOCAB", VOCAB)
    monkeypatch.setattr(engine_fakes.Shape, "vocab_size", VOCAB)


class NotedRunner(ModelRunner):
    """Notes the calls of each step, and lets a test raise in `sample`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.calls: list[tuple[str, int]] = []
        self.steps: list[Launched] = []
        self.on_sample: Callable[[Launched], None] = lambda _: None

    def launch(self, plan: StepPlan) -> Launched:
        launched = super().launch(plan)
        self.steps.append(launched)
        self._note("launch", launched)
        return launched

    def sample(self, launched: Launched, masks: StepMasks) -> None:
        self._note("sample", launched)
        assert not ModelRunner.landed(self, launched)
        self.on_sample(launched)
        super().sample(launched, masks)

    def collect(self, launched: Launched) -> StepOutcome:
        self._note("collect", launched)
        return super().collect(launched)

    def _note(self, call: str, launched: Launched) -> None:
        [number] = [i for i, step in enumerate(self.steps) if step is launched]
        self.calls.append((call, number))


def make_rig(*, overlap: bool, graphs: bool = False) -> tuple[Rig, NotedRunner]:
    config = EngineConfig(
        num_blocks=200,
        max_model_len=64,
        block_size=4,
        max_batched_tokens=64,
        vocab_size=VOCAB,
        max_running_requests=6,
        overlap=overlap,
    )
    pool = torch.zeros(config.num_blocks, 1, 1, 2, config.block_size, 2)
    attention: Any = PlannedAttention() if graphs else NoAttention()
    model = GraphModel(pool) if graphs else engine_fakes.HashModel(pool)
    runner = NotedRunner(model, attention, pool)
    if graphs:
        runner.capture(6, config.max_model_len, recorder=Recorder())
    return Rig(Engine(config, runner), pool, model), runner


def ask(name: str, pattern: str | None = PATTERN, **settings: Any) -> RequestSpec:
    given: dict[str, Any] = {"max_tokens": 30, "stop_token_ids": frozenset({EOS}), **settings}
    made = spec(name, range(9), **given)
    return replace(made, grammar=None if pattern is None else regex(pattern))


def serve(rig: Rig, requests: list[RequestSpec]) -> dict[tuple[str, int], list[int]]:
    for request in requests:
        rig.engine.submit(request)
    rig.drain()
    return {(r.request_id, c): rig.tokens(r.request_id, c) for r in requests for c in r.choices}


def test_the_next_forward_is_launched_before_a_step_is_collected_and_sampled_after() -> None:
    rig, runner = make_rig(overlap=True)
    serve(rig, [ask("a", seed=1)])
    calls = runner.calls
    for step in range(1, 10):
        at = {call: calls.index((call, step)) for call in ("launch", "sample", "collect")}
        before = calls.index(("collect", step - 1))
        assert at["launch"] < before < at["sample"] < at["collect"]
    assert re.fullmatch(PATTERN, text_of(rig.tokens("a")))


def test_steps_without_a_grammar_are_sampled_by_their_launch() -> None:
    rig, runner = make_rig(overlap=True)
    serve(rig, [ask("a", None), ask("b", None, temperature=0.8)])
    assert not [call for call, _ in runner.calls if call == "sample"]
    assert all(step.prepared is None for step in runner.steps)


@pytest.mark.parametrize("graphs", [False, True])
def test_overlap_and_graphs_change_no_token(graphs: bool) -> None:
    requests = [
        ask("greedy"),
        ask("drawn", temperature=1.0, top_p=0.9, seed=2, logprobs=2),
        ask("penalized", temperature=0.7, frequency_penalty=1.0, repetition_penalty=1.2, seed=3),
        ask("forks", temperature=1.0, choices=(0, 1), seed=4),
        ask("free", None, temperature=0.9, seed=5),
    ]
    told = serve(make_rig(overlap=False)[0], requests)
    rig, _ = make_rig(overlap=True, graphs=graphs)
    assert serve(rig, requests) == told
    for (name, choice), tokens in told.items():
        if name != "free":
            assert re.fullmatch(PATTERN, text_of(tokens)), (name, choice)


@pytest.mark.parametrize("overlap", [False, True])
def test_sampling_that_raises_loses_one_request_at_most(overlap: bool) -> None:
    told = serve(make_rig(overlap=False)[0], [ask("a", seed=1), ask("b", seed=2)])
    rig, runner = make_rig(overlap=overlap)
    raised = []

    def cursed(launched: Launched) -> None:
        names = {draw.sequence.request.request_id for draw in launched.draws}
        if "c" in names and launched.draws[0].position >= 3:
            raised.append(names)
            raise RuntimeError("cursed")

    runner.on_sample = cursed
    serve(rig, [ask("a", seed=1), ask("c", seed=3), ask("b", seed=2)])
    assert {"c"} in raised and len(raised) > 1
    assert rig.ended["c"].reason is LegEndReason.FAILED
    assert "cursed" in rig.ended["c"].message
    assert {(name, 0): rig.tokens(name) for name in "ab"} == told


@pytest.mark.parametrize("overlap", [False, True])
def test_sampling_without_memory_is_done_in_parts(overlap: bool) -> None:
    requests = [ask("a", seed=1), ask("b", seed=2), ask("c", None, seed=3)]
    told = serve(make_rig(overlap=False)[0], requests)
    rig, runner = make_rig(overlap=overlap)
    short = []

    def scarce(launched: Launched) -> None:
        if len(launched.draws) > 1:
            short.append(len(launched.draws))
            raise torch.OutOfMemoryError("no memory")

    finish = runner._finish

    def scarce_finish(launched: Launched, masks: StepMasks | None) -> None:
        if masks is not None:
            scarce(launched)
        finish(launched, masks)

    runner._finish = scarce_finish  # type: ignore[method-assign]
    assert serve(rig, requests) == told
    assert 2 in short or 3 in short
    assert all(end.reason is LegEndReason.FINISHED for end in rig.ended.values())


def test_an_abort_between_launch_and_sampling_leaves_the_others_alone() -> None:
    told = serve(make_rig(overlap=False)[0], [ask("b", seed=2)])
    rig, runner = make_rig(overlap=True)
    rig.engine.submit(ask("a", seed=1))
    rig.engine.submit(ask("b", seed=2))
    held = [True]
    runner.landed = lambda launched: not held[0]  # type: ignore[method-assign]
    for _ in range(3):
        rig.step()
    held[0] = True
    assert not rig.engine.step(wait=False).outputs, "launched, and the one before not collected"
    assert runner.calls[-1][0] == "launch"
    rig.engine.abort("a")
    held[0] = False
    rig.drain()
    assert rig.ended["a"].reason is LegEndReason.ABORTED
    assert {("b", 0): rig.tokens("b")} == told


def test_a_grammar_that_gets_stuck_fails_its_request_alone() -> None:
    told = serve(make_rig(overlap=False)[0], [ask("b", seed=2)])
    rig, _ = make_rig(overlap=True)
    stuck = ask("a", "[a-z]{13,20}", seed=1)
    assert stuck.grammar is not None and not isinstance(stuck.grammar, GrammarError)
    rig.engine.submit(stuck)
    rig.engine.submit(ask("b", seed=2))
    for _ in range(4):
        rig.step()
    stuck.grammar.stuck = GrammarError("the next tokens were not found")
    rig.drain()
    assert rig.ended["a"].reason is LegEndReason.FAILED
    assert rig.ended["a"].message == "the next tokens were not found"
    assert {("b", 0): rig.tokens("b")} == told
