"""Bits and logits: what a mask forbids, and what it leaves alone."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from engine_fakes import spec
from grammar_fakes import EOS, TOKENS, VOCAB, compiler, regex, text_of, tokenizer

from tasuki.engine.api import RequestSpec
from tasuki.engine.errors import ForbiddenTokenError, GrammarError
from tasuki.engine.grammar import Grammar, GrammarSource, GrammarState
from tasuki.engine.plan import Draw, Row, StepPlan
from tasuki.engine.request import Request, SequenceState
from tasuki.execution.grammar_masks import StepMasks, make_masks
from tasuki.execution.inputs import wanted_logits
from tasuki.execution.mask_threads import MaskThreads, StuckError
from tasuki.execution.sampler import Sampler


def sequence_of(grammar: Grammar | None, outputs: Sequence[int] = (), **settings) -> SequenceState:
    given = {"stop_token_ids": frozenset({EOS}), "max_tokens": 99, **settings}
    made = spec("a", [5, 6], **given)
    request = RequestSpec("a", made.leg, [5, 6], made.sampling, list(outputs), grammar=grammar)
    return Request(request, 0, b"", 0.0).sequences[0]


def never(sequence: SequenceState) -> int:
    raise AssertionError("nothing is in flight")


def masks_of(draws, constrained, upcoming) -> StepMasks:
    return make_masks(draws, constrained, upcoming, MaskThreads(threads=1))


def allowed(masks: StepMasks, draw: int) -> list[int]:
    row = masks.bits[masks.rows[draw]]
    return [t for t in range(VOCAB) if t >> 5 < len(row) and row[t >> 5] >> np.uint32(t & 31) & 1]


def words(text: str) -> list[int]:
    return list(tokenizer().encode(text).ids)


def test_tokens_that_may_follow() -> None:
    sequence = sequence_of(regex("[0-9]{2}x?"), words("1"))
    masks = masks_of([Draw.next(sequence, 0)], [0], never)
    texts = {text_of([token]) for token in allowed(masks, 0)}
    assert set("0123456789") <= texts
    assert all(text and text[0].isdigit() for text in texts)
    assert EOS not in allowed(masks, 0)


def test_the_end_where_it_matches() -> None:
    sequence = sequence_of(regex("[0-9]{2}x?"), words("12"))
    masks = masks_of([Draw.next(sequence, 0)], [0], never)
    assert sorted(text_of([t]) for t in allowed(masks, 0)) == ["", "x"]
    assert EOS in allowed(masks, 0)
    late = sequence_of(regex("[0-9]{2}x?"), words("12"), min_tokens=9)
    masks = masks_of([Draw.next(late, 0)], [0], never)
    assert [text_of([t]) for t in allowed(masks, 0)] == ["x"]


@pytest.mark.parametrize("stops", [{EOS}, {EOS, 9}, set()])
def test_nothing_else_may_follow(stops: set[int]) -> None:
    for least in (0, 50):
        settings = {"stop_token_ids": frozenset(stops), "min_tokens": least}
        sequence = sequence_of(regex("ab"), words("ab"), **settings)
        masks = masks_of([Draw.next(sequence, 0)], [0], never)
        assert set(allowed(masks, 0)) == (stops or {EOS})


def test_nothing_may_follow_at_all() -> None:
    digits = frozenset(t for t in range(VOCAB) if text_of([t]).strip().isdigit())
    sequence = sequence_of(regex("a[0-9]"), words("a"), stop_token_ids=digits)
    masks = masks_of([Draw.next(sequence, 0)], [0], never)
    assert not masks.rows
    assert isinstance(masks.errors[sequence], GrammarError)
    assert masks.refused([Draw.next(sequence, 0)], [3]) == masks.errors


def test_a_token_in_flight_is_part_of_the_answer() -> None:
    known = sequence_of(regex("abc"), [])
    [token, *_] = words("abc")
    ahead = masks_of([Draw(known, 0, 1)], [0], lambda _: token)
    known.tokens.append(token)
    told = masks_of([Draw.next(known, 0)], [0], never)
    assert allowed(ahead, 0) == allowed(told, 0)


def test_what_was_in_flight_is_forgotten_with_its_epoch() -> None:
    sequence = sequence_of(regex("[ab]c"))
    masks_of([Draw(sequence, 0, 1)], [0], lambda _: words("a")[0])
    sequence.epoch += 1  # preempted: the token is void
    masks = masks_of([Draw.next(sequence, 0)], [0], never)
    assert {text_of([t])[0] for t in allowed(masks, 0)} == {"a", "b"}


@pytest.mark.parametrize("token", [-1, EOS, VOCAB - 1, 10**6])
def test_a_token_in_flight_that_does_not_match(token: int) -> None:
    """Its row is void by then, or fails."""
    sequence = sequence_of(regex("abc"))
    masks = masks_of([Draw(sequence, 0, 1)], [0], lambda _: token)
    assert isinstance(masks.errors[sequence], GrammarError)


def test_logits_of_other_rows_are_left_alone() -> None:
    bound = [sequence_of(regex("[ab]+")), sequence_of(regex("[0-9]+"))]
    free = sequence_of(None)
    draws = [Draw.next(each, 0) for each in (free, bound[0], free, bound[1], bound[0])]
    masks = masks_of(draws, [1, 3, 4], never)
    assert len(masks.bits) == 2
    work = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(1))
    before = work.clone()
    masks.apply(work, range(5))
    for row in (0, 2):
        assert torch.equal(work[row], before[row])
    for row in (1, 3, 4):
        kept = allowed(masks, row)
        assert torch.equal(work[row, kept], before[row, kept])
        assert int(work[row].isfinite().sum()) == len(kept)
    alone = before[[3]].clone()
    masks.apply(alone, [3])
    assert torch.equal(alone[0], work[3])


@pytest.mark.parametrize("vocab", [VOCAB, TOKENS - 7, VOCAB + 300])
def test_logits_may_be_more_or_fewer_than_tokens(vocab: int) -> None:
    masks = masks_of([Draw.next(sequence_of(regex("(?s).+")), 0)], [0], never)
    work = torch.zeros(1, vocab)
    masks.apply(work, [0])
    found = work[0].isfinite().nonzero()[:, 0].tolist()
    assert found == [token for token in allowed(masks, 0) if token < vocab]
    assert max(found) < TOKENS and 0 not in found


def test_a_forbidden_token_is_refused() -> None:
    draws = [Draw.next(sequence_of(regex("[ab]+")), 0), Draw.next(sequence_of(None), 0)]
    masks = masks_of(draws, [0], never)
    [fine, *_] = allowed(masks, 0)
    assert not masks.refused(draws, [fine, 7])
    assert not masks.refused(draws, [-1, 7])  # not finite: told as such
    [error] = masks.refused(draws, [EOS, 7]).values()
    assert isinstance(error, ForbiddenTokenError)


def test_a_row_with_a_grammar_needs_all_logits() -> None:
    """Of a divided model, the best of each part are not enough."""
    rows = [sequence_of(None), sequence_of(regex("a+"))]
    plans = [StepPlan([Row(s, 2, 0, 0) for s in some]) for some in (rows, rows[:1])]
    found = [wanted_logits(plan) for plan in plans]
    assert [(w.greedy, list(w.constrained)) for w in found] == [(False, [1]), (True, [])]


def test_greedy_takes_the_best_allowed() -> None:
    sequence = sequence_of(regex("[0-9]"))
    draws = [Draw.next(sequence, 0)]
    masks = masks_of(draws, [0], never)
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(3))
    [token] = Sampler(logits.device).sample(logits, [0], draws, masks=masks).tokens.tolist()
    kept = allowed(masks, 0)
    assert token == kept[int(logits[0, kept].argmax())]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_schema", '{"type": "integer", "multipleOf": 0.5, "not": {}}'),
        ("json_schema", "{"),
        ("json_schema", "[]"),
        ("json_schema", "false"),
        ("json_schema", '{"allOf": [{"type": "string"}, {"type": "object"}]}'),
        ("regex", "(a"),
        ("lark", "start: missing"),
        ("lark", ""),
    ],
)
def test_what_does_not_compile(kind: str, text: str) -> None:
    with pytest.raises(GrammarError, match=f"the {kind} is refused: .+"):
        compiler().compile(GrammarSource(kind, text))


def test_true_is_any_value() -> None:
    grammar = compiler().compile(GrammarSource("json_schema", " true "))
    state = grammar.start()
    state.advance(words('{"a": [1, null]}'))
    bits = grammar.rows(1)
    state.fill(bits[0])
    state.finish_row(bits[0], [], banned=False)
    assert np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist() == [EOS]


def test_a_grammar_that_gets_stuck_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others of its step go on; its other answers, and later ones, are refused at once."""
    grammars = {name: regex(f"[a-z]{{2}}{name}") for name in "xyz"}
    sequences = [sequence_of(grammars[name]) for name in "xyz"]
    late = sequence_of(grammars["y"])
    may = threading.Event()
    fill, fill_all = GrammarState.fill, GrammarState.fill_all

    def stuck(state: GrammarState, bits) -> None:
        if state is sequences[1].grammar:
            may.wait(30)
        fill(state, bits)

    def stuck_together(states, bits, executor) -> None:
        if sequences[1].grammar in states:
            may.wait(30)
        fill_all(states, bits, executor)

    monkeypatch.setattr(GrammarState, "fill", stuck)
    monkeypatch.setattr(GrammarState, "fill_all", staticmethod(stuck_together))
    threads = MaskThreads(limit_s=0.2, threads=1)
    draws = [Draw.next(each, 0) for each in sequences]
    masks = make_masks(draws, [0, 1, 2], never, threads)
    assert sorted(masks.rows) == [0, 2]
    assert isinstance(masks.errors[sequences[1]], StuckError)
    masks = make_masks([Draw.next(late, 0)], [0], never, threads)
    assert masks.errors == {late: grammars["y"].stuck}
    may.set()
    again = make_masks(draws[:1], [0], never, threads)
    assert list(again.rows) == [0]


def test_after_too_many_nothing_is_tried() -> None:
    may = threading.Event()
    threads = MaskThreads(limit_s=0.05, threads=1, most_left_behind=2)
    waits = [lambda: may.wait(30) and None] * 2
    assert all(isinstance(error, StuckError) for error in threads.run(waits))
    [error] = threads.run([lambda: None])
    assert "restart" in str(error)
    may.set()
