"""The tokens that grammars allow at a step's draws: bits, made on the host. No torch.

    device   forward n ──▶ sample n ──▶ forward n + 1 ───────────────▶ sample n + 1
    host                           └─▶ collect n ▶ states ▶ bits ──────┘

A step is launched before its bits are made, and sampled with them: they are made while the
device computes its logits, once the step before is collected, so that every token is known.

A row whose bits cannot be made is sampled without them. `refused` names it, as it does a
token that the bits forbid, so neither is ever reported. Engine thread only.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from llguidance import LLExecutor
from numpy.typing import NDArray

from tasuki.engine.errors import ForbiddenTokenError, GrammarError
from tasuki.engine.grammar import Ending, Grammar, GrammarState
from tasuki.engine.mask_threads import MaskThreads, StuckError
from tasuki.engine.plan import Draw
from tasuki.engine.request import SequenceState


def _state_of(sequence: SequenceState) -> tuple[GrammarState, list[int]]:
    """The state of a sequence, and the tokens that it has not seen.

    Raises:
        GrammarError: The grammar is of no more use.
    """
    grammar = sequence.request.grammar
    assert grammar is not None
    if grammar.stuck is not None:
        raise grammar.stuck
    state = sequence.grammar
    if state is None or state.epoch != sequence.epoch:
        state = sequence.grammar = grammar.start(sequence.epoch)
    first = sequence.request.num_prompt_tokens + state.outputs
    return state, sequence.tokens[first:].tolist()


@dataclass(slots=True)
class StepMasks:
    """What a step's grammars allow.

    Attributes:
        rows: Of `bits`, by the index of the draw; draws without a grammar have none.
        bits: [n, W] uint32; bit i of word w is token 32 w + i.
        errors: Sequences without bits, and why.
    """

    rows: dict[int, int] = field(default_factory=dict)
    bits: NDArray[np.uint32] = field(default_factory=lambda: np.zeros((0, 0), dtype=np.uint32))
    errors: dict[SequenceState, Exception] = field(default_factory=dict)

    def refused(
        self, draws: Sequence[Draw], tokens: Sequence[int]
    ) -> dict[SequenceState, Exception]:
        """Sequences that have no bits, or a token that their bits forbid, and why.

        Args:
            draws: Of the step.
            tokens: Sampled; negative ones are none.
        """
        refused = dict(self.errors)
        for index, row in self.rows.items():
            token, draw = tokens[index], draws[index]
            if token >= 0 and not self.bits[row, token >> 5] >> np.uint32(token & 31) & 1:
                refused[draw.sequence] = ForbiddenTokenError(
                    f"token {token} was sampled at output position {draw.position}, which the"
                    " request's grammar forbids: the device or the sampler is at fault"
                )
        return refused


def make_masks(
    draws: Sequence[Draw],
    constrained: Sequence[int],
    threads: MaskThreads,
    void: Collection[SequenceState] = (),
) -> StepMasks:
    """The bits of a step.

    Args:
        draws: Of the step. All tokens before them are known.
        constrained: Those with a grammar, by index.
        threads: Compute them.
        void: Sequences that have ended or given way since the step was planned; they get none.
    """
    masks = StepMasks()
    rows: dict[SequenceState, int] = {}
    answers: list[_Answer] = []
    for index in constrained:
        sequence = draws[index].sequence
        if sequence in rows or sequence in masks.errors or sequence in void:
            continue
        try:
            answers.append(_Answer(sequence, *_state_of(sequence)))
        except GrammarError as error:
            masks.errors[sequence] = error
        else:
            rows[sequence] = len(rows)
    if not answers:
        return masks
    masks.bits = _make_together(answers, threads)
    masks.errors |= {answer.sequence: answer.error for answer in answers if answer.error}
    for index in constrained:
        sequence = draws[index].sequence
        if sequence in rows and sequence not in masks.errors:
            masks.rows[index] = rows[sequence]
    return masks


@dataclass(slots=True)
class _Answer:
    """A row to be made: of a state, and the tokens by which it is behind."""

    sequence: SequenceState
    state: GrammarState
    behind: Sequence[int]
    error: Exception | None = None

    @property
    def grammar(self) -> Grammar:
        grammar = self.sequence.request.grammar
        assert grammar is not None
        return grammar

    def advance(self) -> None:
        """Let the state see all tokens."""
        try:
            self.state.advance(self.behind)
        except GrammarError as error:
            self.error = error

    @property
    def ending(self) -> Ending:
        """How the answer may end here."""
        params = self.sequence.request.spec.sampling
        return Ending(params.stop_token_ids, self.state.outputs < params.min_tokens)

    def anew(self) -> _Answer:
        """Another one, with a new state: a thread may still use this one."""
        self.sequence.grammar = None
        try:
            return _Answer(self.sequence, *_state_of(self.sequence))
        except GrammarError as error:
            return _Answer(self.sequence, self.state, self.behind, error)


def _make_together(each: list[_Answer], threads: MaskThreads) -> NDArray[np.uint32]:
    """The bits of all answers, [n, W], in one call of the library; errors go to the answers.

    If that call does not end, or fails, all begin again, each grammar for itself: then it shows
    which one is at fault. Others take the places in `each` then.
    """
    bits = each[0].grammar.rows(len(each))
    [failed] = threads.run([partial(_make_at_once, tuple(each), bits, threads.executor)])
    if failed is not None:
        threads.leave_executor()
        bits = each[0].grammar.rows(len(each))
        groups: dict[Grammar, list[int]] = {}
        each[:] = [answer.anew() for answer in each]
        for row, answer in enumerate(each):
            groups.setdefault(answer.grammar, []).append(row)
        tasks = [
            partial(_make_rows, [(each[row], bits[row]) for row in g]) for g in groups.values()
        ]
        for (grammar, own), error in zip(groups.items(), threads.run(tasks), strict=True):
            if isinstance(error, StuckError):
                grammar.stuck = error
            for row in own:
                each[row].error = error or each[row].error
    return bits


def _make_at_once(
    answers: Sequence[_Answer], bits: NDArray[np.uint32], executor: LLExecutor
) -> None:
    for answer in answers:
        answer.advance()
    live = [row for row, answer in enumerate(answers) if answer.error is None]
    if not live:
        return
    made = bits if len(live) == len(answers) else np.zeros_like(bits[: len(live)])
    GrammarState.fill_all([answers[row].state for row in live], made, executor)
    _finish([answers[row] for row in live], made)
    if made is not bits:
        bits[live] = made


def _make_rows(own: Sequence[tuple[_Answer, NDArray[np.uint32]]]) -> None:
    """Answers of one grammar, one after another.

    Their states share a lock of the library, and whoever waits for it holds the interpreter.
    """
    for answer, bits in own:
        if answer.grammar.stuck is not None:
            return
        if answer.error is None:
            answer.advance()
        if answer.error is None:
            answer.state.fill(bits)
            _finish([answer], bits[None])


def _finish(answers: Sequence[_Answer], bits: NDArray[np.uint32]) -> None:
    endings = [answer.ending for answer in answers]
    errors = GrammarState.finish_all([answer.state for answer in answers], bits, endings)
    for answer, error in zip(answers, errors, strict=True):
        answer.error = error
