"""Drafts: answers with them are those without, whatever was guessed."""

from __future__ import annotations

import random
import sys
from array import array
from collections.abc import Sequence
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest
import torch
from engine_fakes import VOCAB, Rig, expected, make_rig, spec
from engine_relay import Relay
from support import searches

from tasuki.attention.batch import Batch
from tasuki.engine import drafts
from tasuki.engine.api import FinishReason, LegEndReason, RequestSpec
from tasuki.engine.cache_groups import CacheGroup
from tasuki.engine.drafts import lookup, note, taken
from tasuki.engine.request import ACCEPTANCE, Request
from tasuki.engine.stats import StepRates

LONGEST = 64


def tokens_of(*values: int) -> array[int]:
    return array("I", values)


def test_what_followed_the_last_occurrence() -> None:
    assert lookup(tokens_of(1, 2, 3, 4, 5, 9, 1, 2, 3, 6, 7, 8, 1, 2, 3), 3) == [6, 7, 8]
    assert lookup(tokens_of(1, 2, 3, 4, 5, 1, 2, 3), 9) == [4, 5, 1, 2, 3, 4, 5, 1, 2]
    assert lookup(tokens_of(7, 7, 7, 7), 4) == [7] * 4
    assert lookup(tokens_of(1, 2, 3, 4, 1, 2), 4) == []
    assert lookup(tokens_of(1, 2), 4) == lookup(tokens_of(1, 2, 3), 4) == []


def test_only_whole_tokens_match() -> None:
    shifted = [0x02000000, 0x03000000, 0x04000000, 0x01000000]  # 1 2 3 4 at an odd byte
    assert lookup(tokens_of(*shifted, 5, 2, 3, 4), 4) == []


def test_a_long_prompt_takes_no_more_python_than_a_short_one() -> None:
    def lines_of(repeats: int) -> int:
        lines: list[str] = []

        def trace(frame: FrameType, event: str, argument: object) -> Any:
            lines.append(event)
            return trace

        tokens = tokens_of(*[1] * repeats, 256, 256, 256)  # 256 is 1, a byte further
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            assert lookup(tokens, 4) == []
        finally:
            sys.settrace(before)
        return len(lines)

    assert lines_of(1_000) == lines_of(10)


@pytest.mark.parametrize(
    ("draft", "tokens", "count"),
    [([4, 5], [4, 5, 6], 3), ([4, 5], [4, 7, 6], 2), ([4, 5], [3, 5, 6], 1), ([4, 5], [4], 1)],
)
def test_a_draft_counts_as_far_as_it_is_what_was_drawn(
    draft: list[int], tokens: list[int], count: int
) -> None:
    assert taken(draft, tokens) == count


class Oracle:
    """Guesses with the answers known: each token of a draft is right with a probability."""

    def __init__(self, right: float, seed: int = 0) -> None:
        self._right = right
        self._random = random.Random(seed)
        self._answers: list[list[int]] = []

    def knows(self, request: RequestSpec, groups: Sequence[CacheGroup] | None = None) -> None:
        more = {} if groups is None else {"groups": groups}
        for choice in request.choices:
            told, _ = expected(request, choice, LONGEST, **more)
            self._answers.append([*request.prompt_tokens, *request.resumed_tokens, *told])

    def lookup(self, tokens: array[int], count: int) -> list[int]:
        known = list(tokens)
        for answer in self._answers:
            if answer[: len(known)] == known:
                rest = [*answer[len(known) :], *[1] * count][:count]
                draw = self._random
                return [t if draw.random() < self._right else draw.randrange(VOCAB) for t in rest]
        return []


@pytest.fixture
def oracle(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Oracle:
    made = Oracle(getattr(request, "param", 0.8))
    monkeypatch.setattr(drafts, "lookup", made.lookup)
    monkeypatch.setattr(StepRates, "decode_s", lambda *_: 1e9)  # all drafts are worth it
    return made


def requests() -> list[RequestSpec]:
    made = [
        spec("greedy", range(9), max_tokens=33),
        spec("drawn", range(5), max_tokens=29, temperature=0.9, top_p=0.9, seed=3),
        spec("stops", range(7), max_tokens=40, temperature=1.0, stop_token_ids=frozenset({3, 9})),
        spec("late", range(6), max_tokens=40, min_tokens=20, stop_token_ids=frozenset(range(9))),
        spec("logprobs", range(4), max_tokens=18, logprobs=2, logit_bias={3: 1.0}),
        spec("penalties", range(8), max_tokens=20, frequency_penalty=0.5),
        spec("forks", range(10), choices=(0, 1, 2), temperature=1.0, max_tokens=21),
        spec("longest", range(30), max_tokens=1000),
    ]
    resumed, _ = expected(made[1], 0, LONGEST)
    made.append(replace(made[1], request_id="resumed", resumed_tokens=resumed[:7]))
    return made


def assert_all_as_expected(rig: Rig, all_of_them: Sequence[RequestSpec]) -> None:
    for request in all_of_them:
        for choice in request.choices:
            tokens, finish = expected(request, choice, LONGEST)
            assert rig.tokens(request.request_id, choice) == tokens, request.request_id
            assert rig.finish(request.request_id, choice) is finish


@pytest.mark.parametrize("oracle", [0.0, 0.5, 0.8, 1.0], indirect=True)
def test_answers_are_those_without_drafts(oracle: Oracle) -> None:
    rig = make_rig(num_blocks=200, draft_tokens=5, max_batched_tokens=64)
    made = requests()
    for request in made:
        oracle.knows(request)
        rig.engine.submit(request)
    rig.drain()
    assert_all_as_expected(rig, made)
    counters = rig.engine.counters()
    assert counters.draft_tokens > 20
    outputs = [output for outputs in rig.outputs.values() for output in outputs]
    several = [output for output in outputs if len(output.tokens) > 1]
    assert (len(several) > 10) == (oracle._right > 0.0)
    assert not any(output.request_id == "penalties" for output in several)
    assert counters.output_tokens == sum(len(output.tokens) for output in outputs)
    assert rig.engine.referenced_blocks == 0


def test_a_step_with_drafts_hangs_no_later_than_another(oracle: Oracle) -> None:
    rig = make_rig(num_blocks=100, draft_tokens=5, max_batched_tokens=64)
    limits: list[float] = []
    forward = rig.model.forward

    def watched(batch: Batch, attention: object) -> torch.Tensor:
        limits.append(rig.engine.step_limit_s)
        return forward(batch, attention)

    request = spec("a", range(4), max_tokens=25)
    oracle.knows(request)
    rig.engine.submit(request)
    rig.step()
    rig.engine._rates.decode_step_s = 0.01  # as measured by a step without drafts
    rig.model.forward = watched  # type: ignore[method-assign]
    rig.drain()
    assert rig.engine.counters().draft_tokens > 0
    assert set(limits) == {rig.engine.config.step_timeout_s}


def test_log_probabilities_are_those_without_drafts(oracle: Oracle) -> None:
    told = []
    for count in (0, 5):
        rig = make_rig(num_blocks=100, draft_tokens=count, max_batched_tokens=64)
        request = spec("a", range(4), max_tokens=25, logprobs=3, temperature=0.7)
        oracle.knows(request)
        rig.engine.submit(request)
        rig.drain()
        told.append([entry for output in rig.outputs["a", 0] for entry in output.logprobs or []])
        assert all(len(o.logprobs or []) == len(o.tokens) for o in rig.outputs["a", 0])
    assert rig.engine.counters().accepted_draft_tokens > 5
    without, drafted = told
    assert [(e.token, e.rank) for e in drafted] == [(e.token, e.rank) for e in without]
    assert [e.logprob for e in drafted] == pytest.approx([e.logprob for e in without])


@pytest.mark.parametrize("oracle", [1.0], indirect=True)
@pytest.mark.parametrize("at", range(1, 9))
def test_an_answer_ends_inside_a_draft(oracle: Oracle, at: int) -> None:
    request = spec("a", range(9), max_tokens=30)
    tokens, _ = expected(request, 0, LONGEST)
    oracle.knows(request)
    stop = frozenset({tokens[at]})
    for params, finish in (
        (replace(request.sampling, max_tokens=at + 1), FinishReason.LENGTH),
        (replace(request.sampling, stop_token_ids=stop), FinishReason.STOP),
    ):
        rig = make_rig(draft_tokens=6, max_batched_tokens=64)
        ending = replace(request, sampling=params)
        rig.engine.submit(ending)
        rig.drain()
        upto = at + 1 if finish is FinishReason.LENGTH else tokens.index(tokens[at]) + 1
        assert rig.tokens("a") == tokens[:upto]
        assert rig.finish("a") is finish
        counters = rig.engine.counters()
        assert counters.accepted_draft_tokens == counters.draft_tokens, "all are right"


def test_cached_prefixes_hold_nothing_of_rejected_drafts(oracle: Oracle) -> None:
    rig = make_rig(num_blocks=200, draft_tokens=5, max_batched_tokens=64)
    first = spec("a", range(9), max_tokens=30)
    oracle.knows(first)
    rig.engine.submit(first)
    rig.drain()
    again = spec("b", [*range(9), *rig.tokens("a")[:27]], max_tokens=12)
    oracle.knows(again)
    rig.engine.submit(again)
    rig.drain()
    assert rig.outputs["b", 0][0].cached_prompt_tokens >= 32
    assert_all_as_expected(rig, [first, again])


@pytest.mark.parametrize("oracle", [0.7], indirect=True)
def test_scarce_blocks_shorten_drafts_and_preempt_nobody_for_them(oracle: Oracle) -> None:
    rig = make_rig(num_blocks=34, draft_tokens=6, max_batched_tokens=64)
    made = [spec(f"r{i}", range(i, i + 9), max_tokens=40, temperature=1.0) for i in range(4)]
    for request in made:
        oracle.knows(request)
        rig.engine.submit(request)
    rig.drain()
    assert_all_as_expected(rig, made)
    assert rig.engine.counters().accepted_draft_tokens > 10


@pytest.mark.parametrize("oracle", [1.0], indirect=True)
def test_drafts_keep_to_the_tokens_of_a_step_and_to_blocks_that_are_not_promised(
    oracle: Oracle,
) -> None:
    rig = make_rig(num_blocks=34, draft_tokens=6, max_batched_tokens=12)
    made = [spec(f"r{i}", range(i, i + 4), max_tokens=20) for i in range(3)]
    for request in made:
        oracle.knows(request)
        rig.engine.submit(request)
    rig.step()
    pool, budget = rig.engine._pool, rig.engine._budget
    budget.reserved_blocks = promised = pool.available - 3  # those that the rows themselves take
    rig.step()
    assert pool.available == promised
    budget.reserved_blocks = 0
    rig.drain()
    assert_all_as_expected(rig, made)
    assert rig.engine.counters().accepted_draft_tokens > 10
    assert rig.model.largest_batch <= 12


@pytest.mark.search
@pytest.mark.parametrize("seed", searches.seeds(6))
def test_handed_over_answers_are_those_without_drafts(oracle: Oracle, seed: int) -> None:
    rng = random.Random(seed)
    rigs = [make_rig(num_blocks=60, draft_tokens=4, max_batched_tokens=64) for _ in range(2)]
    relay = Relay(rigs, seed)
    made = []
    for index in range(6):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(2, 20))]
        temperature = rng.choice([0.0, 1.0])
        name, longest = f"r{index}", rng.randint(8, 24)
        request = spec(name, prompt, max_tokens=longest, temperature=temperature, seed=index)
        oracle.knows(request)
        made.append(request)
        relay.submit(request, index % 2, 1 - index % 2)
    relay.drain()
    for index, request in enumerate(made):
        rig = rigs[1 - index % 2]
        assert rig.ended[request.request_id].reason is LegEndReason.FINISHED
        assert rig.tokens(request.request_id) == expected(request, 0, LONGEST)[0]
    assert sum(rig.engine.counters().accepted_draft_tokens for rig in rigs) > 0


def acceptance_of(*accepted: bool) -> float:
    sequence = Request(spec("a", [1]), 0, b"", 0.0).sequences[0]
    for each in accepted:
        note(sequence, 1, int(each))
    return sequence.acceptance


def test_acceptance_follows_what_was_accepted() -> None:
    assert acceptance_of() == ACCEPTANCE
    assert acceptance_of(*[True] * 30) > 0.95
    assert acceptance_of(*[False] * 30) < 0.05


@pytest.mark.parametrize(("oracle", "cost"), [(0.0, 0.3), (0.5, 1e9)], indirect=["oracle"])
def test_drafts_that_do_not_pay_end(
    oracle: Oracle, cost: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For being rejected, or for what they cost: then few are made."""
    rig = make_rig(num_blocks=64, draft_tokens=4, max_batched_tokens=64)
    drafter = rig.engine._scheduler.drafter
    drafter._cost_s = cost
    monkeypatch.setattr(StepRates, "decode_s", lambda *_: 1.0)
    monkeypatch.setattr(drafter, "learn", lambda *_: None)
    request = spec("a", range(9), max_tokens=50)
    oracle.knows(request)
    rig.engine.submit(request)
    rig.drain()
    assert rig.engine.counters().draft_tokens < 20
    assert_all_as_expected(rig, [request])


def test_a_sequence_without_drafts_tries_again(oracle: Oracle) -> None:
    rig = make_rig(num_blocks=64, draft_tokens=4, max_batched_tokens=64)
    rig.engine._scheduler.drafter._cost_s = 0.3e9
    request = spec("a", range(9), max_tokens=50)
    oracle.knows(request)
    rig.engine.submit(request)
    rig.step()
    rig.step()
    [sequence] = rig.engine._queues.running
    sequence.acceptance = 0.28
    rig.drain()
    assert rig.engine.counters().draft_tokens > 0
    assert_all_as_expected(rig, [request])
