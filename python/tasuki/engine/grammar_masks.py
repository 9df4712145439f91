"""The tokens that grammars allow at a step's draws: made on the host, applied to logits.

    forward (device) ───────────────────────▶ logits ─▶ apply ─▶ sample
    host: the tokens so far ▶ states ▶ bits ─upload──────┘          └─▶ refused?

The bits are made while the device computes the step, after the forward was launched. A row
that starts from a token in flight needs that token first: the host waits for it.

A row whose bits cannot be made is sampled without them. `refused` names it, as it does a
token that the bits forbid, so neither is ever reported. Engine thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tasuki.engine.errors import ForbiddenTokenError, GrammarError
from tasuki.engine.grammar import Grammar, GrammarState
from tasuki.engine.grammar_progress import state_of
from tasuki.engine.host_buffers import upload
from tasuki.engine.mask_threads import MaskThreads, StuckError
from tasuki.engine.plan import Draw
from tasuki.engine.request import SequenceState


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
    behind: dict[SequenceState, tuple[GrammarState, list[int]]] = {}
    for index in constrained:
        sequence = draws[index].sequence
        if sequence not in behind and sequence not in masks.errors:
            ahead = draws[index].position > sequence.num_outputs
            try:
                behind[sequence] = state_of(sequence, (upcoming(sequence),) if ahead else ())
            except GrammarError as error:
                masks.errors[sequence] = error
    if not behind:
        return masks
    grammar = next(iter(behind)).request.grammar
    assert grammar is not None
    masks.bits = grammar.rows(len(behind))
    groups: dict[Grammar, list[_Answer]] = {}
    for row, (sequence, (state, tokens)) in enumerate(behind.items()):
        own = sequence.request.grammar
        assert own is not None
        groups.setdefault(own, []).append(_Answer(sequence, state, tokens, masks.bits[row]))
    results = threads.run([partial(_make_rows, own, group) for own, group in groups.items()])
    for (own, group), failed in zip(groups.items(), results, strict=True):
        if isinstance(failed, StuckError):
            own.stuck = failed
        for answer in group:
            if (reason := failed or answer.error) is not None:
                masks.errors[answer.sequence] = reason
    rows = {sequence: row for row, sequence in enumerate(behind)}
    for index in constrained:
        if (sequence := draws[index].sequence) not in masks.errors:
            masks.rows[index] = rows[sequence]
    return masks


@dataclass(slots=True)
class _Answer:
    """A row to be made: the tokens to go on by, and where the bits go."""

    sequence: SequenceState
    state: GrammarState
    tokens: Sequence[int]
    bits: NDArray[np.uint32]
    error: GrammarError | None = None


def _make_rows(grammar: Grammar, answers: Sequence[_Answer]) -> None:
    """Go on by some tokens, and write the bits of those that may follow.

    One after another: states of one grammar share a lock of the library, and whoever waits for
    it holds the interpreter.
    """
    for answer in answers:
        if grammar.stuck is not None:
            return
        state, params = answer.state, answer.sequence.request.spec.sampling
        try:
            state.advance(answer.tokens)
            state.fill(answer.bits)
            banned = state.outputs < params.min_tokens
            state.finish_row(answer.bits, params.stop_token_ids, banned)
        except GrammarError as error:
            answer.error = error


def _forbidden(bits: NDArray[np.uint32], vocab: int, device: torch.device) -> torch.Tensor:
    """Whether each token is forbidden: [n, vocab] bool on the device, from bits [n, W]."""
    raw: NDArray[Any] = np.ascontiguousarray(bits).view(np.uint8)
    if raw.shape[1] * 8 < vocab:
        raw = np.pad(raw, ((0, 0), (0, -(-vocab // 8) - raw.shape[1])))
    each = upload([1 << i for i in range(8)], torch.uint8, device)
    expanded = upload(raw, torch.uint8, device)[:, :, None] & each
    return (expanded == 0).flatten(1)[:, :vocab]
