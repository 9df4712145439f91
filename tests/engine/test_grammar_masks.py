"""Bits: what a grammar allows after an answer's tokens."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from grammar_fakes import (
    EOS,
    VOCAB,
    allowed,
    compiler,
    masks_of,
    regex,
    sequence_of,
    text_of,
    tokenizer,
)

from tasuki.engine.errors import FailureKind, ForbiddenTokenError, GrammarError, kind_of
from tasuki.engine.grammar import Ending, GrammarSource, GrammarState
from tasuki.engine.grammar_masks import make_masks
from tasuki.engine.mask_threads import MaskThreads, StuckError
from tasuki.engine.plan import Draw


def words(text: str) -> list[int]:
    return list(tokenizer().encode(text).ids)


def test_tokens_that_may_follow() -> None:
    sequence = sequence_of(regex("[0-9]{2}x?"), words("1"))
    masks = masks_of([Draw.next(sequence, 0)], [0])
    texts = {text_of([token]) for token in allowed(masks, 0)}
    assert set("0123456789") <= texts
    assert all(text and text[0].isdigit() for text in texts)
    assert EOS not in allowed(masks, 0)


def test_the_end_where_it_matches() -> None:
    sequence = sequence_of(regex("[0-9]{2}x?"), words("12"))
    masks = masks_of([Draw.next(sequence, 0)], [0])
    assert sorted(text_of([t]) for t in allowed(masks, 0)) == ["", "x"]
    assert EOS in allowed(masks, 0)
    late = sequence_of(regex("[0-9]{2}x?"), words("12"), min_tokens=9)
    masks = masks_of([Draw.next(late, 0)], [0])
    assert [text_of([t]) for t in allowed(masks, 0)] == ["x"]


@pytest.mark.parametrize("stops", [{EOS}, {EOS, 9}, set()])
def test_nothing_else_may_follow(stops: set[int]) -> None:
    for least in (0, 50):
        settings = {"stop_token_ids": frozenset(stops), "min_tokens": least}
        sequence = sequence_of(regex("ab"), words("ab"), **settings)
        masks = masks_of([Draw.next(sequence, 0)], [0])
        assert set(allowed(masks, 0)) == (stops or {EOS})


def test_nothing_may_follow_at_all() -> None:
    digits = frozenset(t for t in range(VOCAB) if text_of([t]).strip().isdigit())
    sequence = sequence_of(regex("a[0-9]"), words("a"), stop_token_ids=digits)
    masks = masks_of([Draw.next(sequence, 0)], [0])
    assert not masks.rows
    assert isinstance(masks.errors[sequence], GrammarError)
    assert masks.refused([Draw.next(sequence, 0)], [3]) == masks.errors


def test_a_state_goes_on_with_the_tokens_since() -> None:
    sequence = sequence_of(regex("abc"))
    masks_of([Draw.next(sequence, 0)], [0])
    sequence.tokens.extend(words("ab"))
    masks = masks_of([Draw.next(sequence, 0)], [0])
    assert [text_of([t]) for t in allowed(masks, 0)] == ["c"]


def test_what_was_seen_is_forgotten_with_its_epoch() -> None:
    sequence = sequence_of(regex("[ab]c"), words("a"))
    masks_of([Draw.next(sequence, 0)], [0])
    sequence.epoch += 1  # preempted; and as if the token were void
    sequence.tokens.pop()
    masks = masks_of([Draw.next(sequence, 0)], [0])
    assert {text_of([t])[0] for t in allowed(masks, 0)} == {"a", "b"}


def test_a_void_sequence_has_no_bits_and_no_error() -> None:
    gone, here = sequence_of(regex("abc"), words("x")), sequence_of(regex("abc"), words("a"))
    masks = masks_of([Draw.next(gone, 0), Draw.next(here, 0)], [0, 1], [gone])
    assert list(masks.rows) == [1]
    assert not masks.errors


@pytest.mark.parametrize("token", [EOS, VOCAB - 1, 10**6])
def test_a_token_that_does_not_match(token: int) -> None:
    sequence = sequence_of(regex("abc"), [token])
    masks = masks_of([Draw.next(sequence, 0)], [0])
    assert isinstance(masks.errors[sequence], GrammarError)
    assert not masks.rows


def test_a_forbidden_token_is_refused() -> None:
    draws = [Draw.next(sequence_of(regex("[ab]+")), 0), Draw.next(sequence_of(None), 0)]
    masks = masks_of(draws, [0])
    [fine, *_] = allowed(masks, 0)
    assert not masks.refused(draws, [fine, 7])
    assert not masks.refused(draws, [-1, 7])  # not finite: told as such
    [error] = masks.refused(draws, [EOS, 7]).values()
    assert isinstance(error, ForbiddenTokenError)


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
    GrammarState.finish_all([state], bits[:1], [Ending()])
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
    masks = make_masks(draws, [0, 1, 2], threads)
    assert sorted(masks.rows) == [0, 2]
    assert isinstance(masks.errors[sequences[1]], StuckError)
    masks = make_masks([Draw.next(late, 0)], [0], threads)
    assert masks.errors == {late: grammars["y"].stuck}
    may.set()
    again = make_masks(draws[:1], [0], threads)
    assert list(again.rows) == [0]


def test_a_call_that_is_left_behind_changes_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on in the middle of another step, and has only states that nobody uses."""
    grammars = [regex("[a-z]{4}"), regex("[0-9]{4}")]
    sequences = [sequence_of(grammar) for grammar in grammars]
    sequences[1].tokens.extend(words("12"))
    begun, may, went_on = threading.Event(), threading.Event(), threading.Event()
    advance = GrammarState.advance

    def late(state: GrammarState, tokens) -> None:
        if not begun.is_set():
            begun.set()
            may.wait(30)
            return
        advance(state, tokens)
        if may.is_set():
            went_on.set()

    monkeypatch.setattr(GrammarState, "advance", late)
    threads = MaskThreads(limit_s=0.2, threads=1)
    draws = [Draw.next(each, 0) for each in sequences]
    masks = make_masks(draws, [0, 1], threads)
    assert not masks.errors
    states = [each.grammar for each in sequences]
    assert [state.outputs for state in states if state is not None] == [0, 2]
    may.set()
    assert went_on.wait(30)
    assert [each.grammar for each in sequences] == states
    assert [state.outputs for state in states if state is not None] == [0, 2]


def test_while_too_many_are_stuck_nothing_is_tried() -> None:
    may = threading.Event()
    threads = MaskThreads(limit_s=0.05, threads=1, most_left_behind=2)
    waits = [lambda: may.wait(30) and None] * 4
    errors = threads.run(waits)
    assert [isinstance(error, StuckError) for error in errors] == [True, True, False, False]
    assert all(kind_of(error) is FailureKind.OVERLOAD for error in errors[2:] if error is not None)
    [error] = threads.run([lambda: None])
    assert error is not None and kind_of(error) is FailureKind.OVERLOAD
    assert "restart" in str(error)
    may.set()
    deadline_s = time.monotonic() + 30
    while threads.run([lambda: None]) != [None]:  # they have ended
        assert time.monotonic() < deadline_s
