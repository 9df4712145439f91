"""Answers with a grammar, of a model that is pure noise: what ends by itself matches."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import engine_fakes
import jsonschema
import pytest
from engine_fakes import Rig, make_rig, spec
from engine_relay import Relay
from grammar_fakes import EOS, VOCAB, compiler, deep_schema, random_schema, regex, schema, text_of
from support import searches

from tasuki.engine.api import FinishReason, LegEndReason, RequestSpec
from tasuki.engine.errors import FailureKind, GrammarError
from tasuki.engine.grammar import Grammar, GrammarSource, GrammarState
from tasuki.engine.mask_threads import LIMIT_S
from tasuki.execution import sampler

STOPS = frozenset({EOS})
LONGEST = 300


@pytest.fixture(autouse=True)
def words(monkeypatch: pytest.MonkeyPatch) -> None:
    """The noise has a vocabulary that spells."""
    monkeypatch.setattr(engine_fakes, "VOCAB", VOCAB)
    monkeypatch.setattr(engine_fakes.Shape, "vocab_size", VOCAB)


def rig_of(**settings: Any) -> Rig:
    sizes = {"num_blocks": 600, "max_model_len": LONGEST + 40, "vocab_size": VOCAB}
    return make_rig(**{**sizes, **settings})


def ask(name: str, grammar: Grammar | None, **settings: Any) -> RequestSpec:
    given = {"max_tokens": LONGEST, "stop_token_ids": STOPS, **settings}
    prompt = given.pop("prompt", range(9))
    return replace(spec(name, prompt, **given), grammar=grammar)


def run(rig: Rig, requests: Sequence[RequestSpec]) -> None:
    for request in requests:
        rig.engine.submit(request)
    rig.drain()


def answer(rig: Rig, name: str, choice: int = 0) -> str | None:
    """An answer that ended by itself; None: it was cut off."""
    assert rig.ended[name].reason is LegEndReason.FINISHED, rig.ended[name]
    if rig.finish(name, choice) is not FinishReason.STOP:
        return None
    return text_of(rig.tokens(name, choice))


def one_answer(grammar: Grammar, **settings: Any) -> str | None:
    rig = rig_of()
    run(rig, [ask("a", grammar, **settings)])
    return answer(rig, "a")


@pytest.mark.search
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("seed", searches.seeds(25))
def test_answers_of_noise_validate(seed: int, temperature: float):
    rng = random.Random(seed)
    wanted = [random_schema(rng) for _ in range(4)]
    rig = rig_of()
    requests = [
        ask(f"r{i}", schema(one), temperature=temperature, seed=seed, prompt=range(i, i + 5))
        for i, one in enumerate(wanted)
    ]
    run(rig, requests)
    for request, one in zip(requests, wanted, strict=True):
        text = answer(rig, request.request_id)
        assert text is not None, f"{one} was cut off: {text_of(rig.tokens(request.request_id))}"
        jsonschema.validate(json.loads(text), one)
        assert rig.tokens(request.request_id)[-1] == EOS


@pytest.mark.parametrize(
    "pattern",
    [
        r"[0-9]{3}-[a-f]{2}",
        r"(yes|no|maybe)",
        r"(ab|cd)+é?",
        r"[^a]{3}",
        r"a/b\n\"c\"",
        r"(?i)tokyo [1-9]",
        r"x?",
    ],
)
def test_answers_match_the_expression(pattern: str):
    ended = [one_answer(regex(pattern), temperature=1.0, seed=seed) for seed in range(6)]
    found = [text for text in ended if text is not None]
    assert found
    for text in found:
        assert re.fullmatch(pattern, text), text


def test_a_lark_grammar():
    lark = 'start: "<" ITEM ("," ITEM)~0..3 ">"\nITEM: /[a-c]{1,2}/'
    text = one_answer(compiler().compile(GrammarSource("lark", lark)))
    assert text is not None and re.fullmatch(r"<[a-c]{1,2}(,[a-c]{1,2}){0,3}>", text)


def test_each_choice_follows_the_grammar_on_its_own():
    rig = rig_of()
    grammar = regex("[a-z]{4,8}")
    run(rig, [ask("a", grammar, choices=(0, 1, 2, 3), temperature=1.0)])
    found = [answer(rig, "a", choice) for choice in range(4)]
    assert all(text and re.fullmatch("[a-z]{4,8}", text) for text in found)
    assert len(set(found)) == 4


def test_rows_beside_a_grammar_are_as_if_alone():
    free = [
        ask(f"f{i}", None, temperature=i % 2, max_tokens=20, prompt=range(i, 9)) for i in range(4)
    ]
    bound = [ask(f"g{i}", regex("[a-z ]{9,20}"), prompt=range(i, 7)) for i in range(3)]
    beside = rig_of()
    run(beside, [free[0], bound[0], free[1], bound[1], free[2], bound[2], free[3]])
    for request in free + bound:
        alone = rig_of()
        run(alone, [request])
        assert beside.tokens(request.request_id) == alone.tokens(request.request_id)


def test_a_cached_prefix_changes_nothing():
    rig = rig_of()
    grammar = regex("[a-z]{5,9}")
    for name in ("a", "b"):
        run(rig, [ask(name, grammar, prompt=range(30))])
    assert rig.outputs["b", 0][0].cached_prompt_tokens > 0
    assert rig.tokens("a") == rig.tokens("b")
    assert re.fullmatch("[a-z]{5,9}", answer(rig, "a") or "")


def test_a_step_may_take_as_long_as_its_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grammars that get stuck take their time; the engine does not count as hung meanwhile."""
    rig = rig_of(step_timeout_s=2.0)
    run(rig, [ask("free", None, max_tokens=9)])
    assert rig.engine.step_limit_s == 2.0
    limits: list[float] = []
    fill_all = GrammarState.fill_all

    def fill(*args: Any) -> None:
        limits.append(rig.engine.step_limit_s)
        fill_all(*args)

    monkeypatch.setattr(GrammarState, "fill_all", staticmethod(fill))
    run(rig, [ask("a", regex("[a-z]{4,8}")), ask("b", None, max_tokens=30)])
    # All of a step's in one call, then 16 grammars that get stuck, at most 8 at once.
    assert len(limits) >= 4 and min(limits) >= 2.0 + 3 * LIMIT_S
    assert rig.engine.step_limit_s == 2.0


def test_preempted_answers_go_on_within_the_grammar():
    grammar = regex("[a-z]{30,40}")
    requests = [ask(f"r{i}", grammar, max_tokens=60, prompt=range(i, i + 8)) for i in range(12)]
    rig = rig_of(num_blocks=50, max_model_len=90)
    run(rig, requests)
    assert rig.engine.counters().preemptions > 0
    for request in requests:
        alone = rig_of()
        run(alone, [request])
        assert rig.tokens(request.request_id) == alone.tokens(request.request_id)
        assert re.fullmatch("[a-z]{30,40}", answer(rig, request.request_id) or "")


@pytest.mark.parametrize("at", [1, 3, 7])
def test_resumed_answers_go_on_within_the_grammar(at: int):
    grammar = schema(
        {"type": "array", "items": {"enum": ["red", "blue"]}, "minItems": 4, "maxItems": 6}
    )
    rig = rig_of()
    whole = ask("a", grammar, temperature=0.9)
    run(rig, [whole])
    tokens = rig.tokens("a")
    run(rig, [replace(ask("b", grammar, temperature=0.9), resumed_tokens=tokens[:at])])
    assert rig.tokens("b") == tokens[at:]


def test_a_resumed_answer_that_does_not_match_fails_by_name():
    rig = rig_of()
    run(rig, [replace(ask("a", regex("[a-c]{9}")), resumed_tokens=[EOS + 1])])
    assert rig.ended["a"].reason is LegEndReason.FAILED
    assert rig.ended["a"].failure is FailureKind.CLIENT
    assert "output token 0" in rig.ended["a"].message
    assert not rig.outputs["a", 0]


@pytest.mark.parametrize("choices", [(0,), (0, 1, 2)])
def test_a_handed_over_answer_is_that_of_one_worker(choices: tuple[int, ...]):
    wanted = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 99999}}}
    grammar = schema({**wanted, "required": ["a"], "additionalProperties": False})
    requests = [
        ask(f"r{i}", grammar, choices=choices, temperature=1.0, prompt=range(i, i + 9))
        for i in range(4)
    ]
    relay = Relay([rig_of(), rig_of()], seed=3)
    for request in requests:
        relay.submit(request, 0, 1)
    relay.drain()
    for request in requests:
        alone = rig_of()
        run(alone, [request])
        name = request.request_id
        assert relay.rigs[1].ended[name].reason is LegEndReason.FINISHED
        for choice in choices:
            assert relay.rigs[1].tokens(name, choice) == alone.tokens(name, choice)
            assert json.loads(answer(alone, name, choice) or "")["a"] <= 99999


@pytest.mark.search
@pytest.mark.parametrize("seed", searches.seeds(12))
def test_any_traffic_over_small_pools_stays_within_the_grammars(seed: int):
    """Split or not, preempted or returned: what was told is what each request gets alone."""
    rng = random.Random(seed)
    patterns = ["[a-z]{12,40}", "([0-9]{2},){3,9}[a-f]", "(yes|no) [xyz]{5,30}", None]
    relay = Relay([rig_of(num_blocks=56, max_model_len=100) for _ in range(2)], seed)
    asked = []
    for index in range(10):
        pattern = rng.choice(patterns)
        request = ask(
            f"r{index}",
            None if pattern is None else regex(pattern),
            max_tokens=60,
            temperature=rng.choice([0.0, 1.0]),
            choices=rng.choice([(0,), (0,), (0, 1)]),
            prompt=range(index, index + rng.randint(1, 30)),
        )
        target = rng.randrange(2)
        asked.append((request, pattern, target))
        relay.submit(request, rng.randrange(2), target)
    relay.drain()
    ended = 0
    for request, pattern, target in asked:
        rig, name = relay.rigs[target], request.request_id
        if rig.ended[name].reason is not LegEndReason.FINISHED:
            continue  # it gave way: a router would place it again
        alone = rig_of()
        run(alone, [request])
        for choice in request.choices:
            assert rig.tokens(name, choice) == alone.tokens(name, choice)
            text = answer(rig, name, choice)
            assert pattern is None or text is None or re.fullmatch(pattern, text), text
            ended += pattern is not None and text is not None
    assert ended > 0


def test_without_a_stop_token_the_answer_ends_where_the_grammar_does():
    """By the model's own, which routers know to be no text."""
    rig = rig_of()
    run(rig, [ask("a", regex("[0-9]{2,6}"), stop_token_ids=frozenset())])
    assert rig.finish("a") is FinishReason.STOP
    assert re.fullmatch("[0-9]{6}", text_of(rig.tokens("a")))
    assert rig.tokens("a")[-1] == EOS


def test_without_a_stop_token_the_end_of_a_handed_over_answer():
    relay = Relay([rig_of(), rig_of()], seed=4)
    relay.submit(ask("a", regex("[0-9]{6}"), stop_token_ids=frozenset()), 0, 1)
    relay.submit(ask("b", regex("[0-9]"), stop_token_ids=frozenset()), 0, 1)
    relay.drain()
    for name, digits in (("a", 6), ("b", 1)):
        told = {**relay.rigs[0].outputs, **relay.rigs[1].outputs}[name, 0]
        assert told[-1].finish is FinishReason.STOP
        tokens = [token for output in told for token in output.tokens]
        assert re.fullmatch(f"[0-9]{{{digits}}}", text_of(tokens))
        assert tokens[-1] == EOS


def test_an_end_comes_only_where_the_grammar_accepts():
    """A bias that wants nothing but the end does not cut an answer short."""
    text = one_answer(regex("[a-z]{12,}"), logit_bias={EOS: 100.0})
    assert text is not None and re.fullmatch("[a-z]{12,}", text)
    assert "".join(text)


def test_min_tokens_holds_while_the_grammar_can_go_on():
    rig = rig_of()
    run(rig, [ask("a", regex("[ab]*"), logit_bias={EOS: 100.0}, min_tokens=7)])
    assert len(rig.tokens("a")) == 8
    assert re.fullmatch("[ab]*", answer(rig, "a") or "")


def test_a_whole_answer_ends_before_min_tokens():
    rig = rig_of()
    run(rig, [ask("a", regex("abab"), min_tokens=50)])
    assert rig.finish("a") is FinishReason.STOP
    assert text_of(rig.tokens("a")) == "abab"
    assert rig.tokens("a")[-1] == EOS


def test_a_stop_token_is_no_text():
    """A token that ends the answer is allowed only where the grammar accepts."""
    rig = rig_of()
    letters = frozenset(token for token in range(2, VOCAB) if "q" in text_of([token]))
    run(rig, [ask("a", regex("q{3}"), stop_token_ids=letters)])
    assert rig.ended["a"].reason is LegEndReason.FAILED
    assert rig.ended["a"].failure is FailureKind.CLIENT
    assert "allows no token" in rig.ended["a"].message


def test_penalties_bias_and_filters_stay_within_the_grammar():
    rig = rig_of()
    settings = {
        "repetition_penalty": 1.3,
        "frequency_penalty": 1.0,
        "logit_bias": {5: 100.0, 66: 3.0},
        "top_k": 2,
        "top_p": 0.5,
        "min_p": 0.1,
        "logprobs": 2,
    }
    requests = [
        ask(f"r{i}", regex("[a-z]{8,16}"), temperature=1.0, seed=i, **settings) for i in range(5)
    ]
    run(rig, requests)
    for request in requests:
        assert re.fullmatch("[a-z]{8,16}", answer(rig, request.request_id) or "")
        assert all(output.logprobs for output in rig.outputs[request.request_id, 0])


def test_a_grammar_that_cannot_be_compiled_is_rejected():
    with pytest.raises(GrammarError, match="regex is refused") as error:
        regex("[a")
    rig = rig_of()
    run(rig, [replace(ask("a", None), grammar=error.value)])
    assert rig.ended["a"].reason is LegEndReason.REJECTED
    assert rig.ended["a"].failure is FailureKind.CLIENT
    assert rig.ended["a"].message == str(error.value)


def test_a_mask_that_is_not_applied_is_caught(monkeypatch: pytest.MonkeyPatch):
    """The planted fault: the sampler forgets the mask. No token that breaks the grammar is told."""
    monkeypatch.setattr(sampler, "forbid", lambda *_: None)
    rig = rig_of()
    run(rig, [ask("a", regex("[a-z]{12}")), ask("b", None, max_tokens=12)])
    assert rig.ended["a"].reason is LegEndReason.FAILED
    assert rig.ended["a"].failure is FailureKind.DEVICE
    assert "forbids" in rig.ended["a"].message
    assert re.fullmatch("[a-z]*", text_of(rig.tokens("a")))
    assert rig.ended["b"].reason is LegEndReason.FINISHED


def test_a_limit_in_mid_answer_fails_that_request_alone():
    """Rows of thousands of alternatives are more than the library follows."""
    chain = {
        str(i): {"anyOf": [{"$ref": f"#/$defs/{i + 1}"}, {"type": "null"}]} for i in range(1500)
    }
    chain["1500"] = {"type": "array", "items": {"$ref": "#/$defs/0"}}
    grammar = deep_schema({"$ref": "#/$defs/0", "$defs": chain})
    rig = rig_of()
    run(rig, [ask("a", grammar, logit_bias={}), ask("b", regex("[a-z]{5}"))])
    assert rig.ended["a"].reason is LegEndReason.FAILED
    assert rig.ended["a"].failure is FailureKind.CLIENT
    assert answer(rig, "b") is not None
