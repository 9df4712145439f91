"""The tokens that grammars allow at a step's draws: made on the host, applied to logits.

    forward (device) ───────────────────────▶ logits ─▶ apply ─▶ sample
    host: the tokens so far ▶ states ▶ bits ─upload──────┘          └─▶ refused?

The bits are made while the device computes the step, after the forward was launched. A row
that starts from a token in flight needs that token first: the host waits for it.

A row whose bits cannot be made is sampled without them. `refused` names it, as it does a
token that the bits forbid, so neither is ever reported. Engine thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from llguidance import LLExecutor
from numpy.typing import NDArray

from tasuki.engine.errors import ForbiddenTokenError, GrammarError
from tasuki.engine.grammar import Grammar, GrammarState
from tasuki.engine.plan import Draw
from tasuki.engine.request import SequenceState
from tasuki.execution.grammar_progress import state_of
from tasuki.execution.host_buffers import upload
from tasuki.execution.mask_threads import MaskThreads, StuckError


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

    def apply(self, work: torch.Tensor, draws: Sequence[int]) -> None:
        """Make the logits of forbidden tokens negative infinity.

        Args:
            work: [n, V] float32; changed.
            draws: Index of the draw of each row.
        """
        own = [(row, self.rows[draw]) for row, draw in enumerate(draws) if draw in self.rows]
        if not own:
            return
        places, sources = zip(*own, strict=True)
        forbidden = _forbidden(self.bits[list(sources)], work.shape[1], work.device)
        if len(own) == len(work):
            work.masked_fill_(forbidden, -torch.inf)
        else:
            at = upload(places, torch.int64, work.device)
            work[at] = work[at].masked_fill_(forbidden, -torch.inf)

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
    upcoming: Callable[[SequenceState], int],
    threads: MaskThreads,
) -> StepMasks:
    """The bits of a step.

    Args:
        draws: Of the step.
        constrained: Those with a grammar, by index.
        upcoming: Gives the token of a sequence that is in flight, once it is known.
        threads: Compute them.
    """
    masks = StepMasks()
    answers: dict[SequenceState, _Answer] = {}
    for index in constrained:
        sequence = draws[index].sequence
        if sequence not in answers and sequence not in masks.errors:
            ahead = draws[index].position > sequence.num_outputs
            tokens = (upcoming(sequence),) if ahead else ()
            try:
                answers[sequence] = _Answer(sequence, tokens, *state_of(sequence, tokens))
            except GrammarError as error:
                masks.errors[sequence] = error
    if not answers:
        return masks
    masks.bits = _make_together(answers, threads)
    for sequence, answer in answers.items():
        if answer.error is not None:
            masks.errors[sequence] = answer.error
    rows = {sequence: row for row, sequence in enumerate(answers)}
    for index in constrained:
        if (sequence := draws[index].sequence) not in masks.errors:
            masks.rows[index] = rows[sequence]
    return masks


@dataclass(slots=True)
class _Answer:
    """A row to be made: of a state, and the tokens by which it is behind."""

    sequence: SequenceState
    upcoming: tuple[int, ...]
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

    def finish(self, bits: NDArray[np.uint32]) -> None:
        """Decide about the tokens that end the answer."""
        params = self.sequence.request.spec.sampling
        banned = self.state.outputs < params.min_tokens
        try:
            self.state.finish_row(bits, params.stop_token_ids, banned)
        except GrammarError as error:
            self.error = error

    def begin_again(self) -> None:
        """Take a new state: the library may still use the old one."""
        self.sequence.grammar = self.error = None
        try:
            self.state, self.behind = state_of(self.sequence, self.upcoming)
        except GrammarError as error:
            self.error = error


def _make_together(
    answers: Mapping[SequenceState, _Answer], threads: MaskThreads
) -> NDArray[np.uint32]:
    """The bits of all answers, [n, W], in one call of the library; errors go to the answers.

    If that call does not end, or fails, all begin again, each grammar for itself: then it shows
    which one is at fault.
    """
    each = list(answers.values())
    bits = each[0].grammar.rows(len(each))
    [failed] = threads.run([partial(_make_at_once, each, bits, threads.executor)])
    if failed is not None:
        threads.leave_executor()
        bits = each[0].grammar.rows(len(each))
        groups: dict[Grammar, list[int]] = {}
        for row, answer in enumerate(each):
            answer.begin_again()
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
    if made is not bits:
        bits[live] = made
    for row in live:
        answers[row].finish(bits[row])


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
            answer.finish(bits)


def _forbidden(bits: NDArray[np.uint32], vocab: int, device: torch.device) -> torch.Tensor:
    """Whether each token is forbidden: [n, vocab] bool on the device, from bits [n, W]."""
    raw: NDArray[Any] = np.ascontiguousarray(bits).view(np.uint8)
    if raw.shape[1] * 8 < vocab:
        raw = np.pad(raw, ((0, 0), (0, -(-vocab // 8) - raw.shape[1])))
    each = upload([1 << i for i in range(8)], torch.uint8, device)
    expanded = upload(raw, torch.uint8, device)[:, :, None] & each
    return (expanded == 0).flatten(1)[:, :vocab]
