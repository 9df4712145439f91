"""Bits and logits: what a mask forbids, and what it leaves alone."""

from __future__ import annotations

import pytest
import torch
from grammar_fakes import TOKENS, VOCAB, allowed, masks_of, regex, sequence_of

from tasuki.engine.plan import Draw, Row, StepPlan
from tasuki.execution.inputs import wanted_logits
from tasuki.execution.sampler import Sampler
from tasuki.execution.token_masks import forbid


def test_logits_of_other_rows_are_left_alone() -> None:
    bound = [sequence_of(regex("[ab]+")), sequence_of(regex("[0-9]+"))]
    free = sequence_of(None)
    draws = [Draw.next(each, 0) for each in (free, bound[0], free, bound[1], bound[0])]
    masks = masks_of(draws, [1, 3, 4])
    assert len(masks.bits) == 2
    work = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(1))
    before = work.clone()
    forbid(work, range(5), masks)
    for row in (0, 2):
        assert torch.equal(work[row], before[row])
    for row in (1, 3, 4):
        kept = allowed(masks, row)
        assert torch.equal(work[row, kept], before[row, kept])
        assert int(work[row].isfinite().sum()) == len(kept)
    alone = before[[3]].clone()
    forbid(alone, [3], masks)
    assert torch.equal(alone[0], work[3])


@pytest.mark.parametrize("vocab", [VOCAB, TOKENS - 7, VOCAB + 300])
def test_logits_may_be_more_or_fewer_than_tokens(vocab: int) -> None:
    masks = masks_of([Draw.next(sequence_of(regex("(?s).+")), 0)], [0])
    work = torch.zeros(1, vocab)
    forbid(work, [0], masks)
    found = work[0].isfinite().nonzero()[:, 0].tolist()
    assert found == [token for token in allowed(masks, 0) if token < vocab]
    assert max(found) < TOKENS and 0 not in found


def test_a_row_with_a_grammar_needs_all_logits() -> None:
    """Of a divided model, the best of each part are not enough."""
    rows = [sequence_of(None), sequence_of(regex("a+"))]
    plans = [StepPlan([Row(s, 2, 0, 0) for s in some]) for some in (rows, rows[:1])]
    found = [wanted_logits(plan) for plan in plans]
    assert [(w.greedy, list(w.constrained)) for w in found] == [(False, [1]), (True, [])]


def test_greedy_takes_the_best_allowed() -> None:
    sequence = sequence_of(regex("[0-9]"))
    draws = [Draw.next(sequence, 0)]
    masks = masks_of(draws, [0])
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(3))
    [token] = Sampler(logits.device).sample(logits, [0], draws, masks=masks).tokens.tolist()
    kept = allowed(masks, 0)
    assert token == kept[int(logits[0, kept].argmax())]
