"""What the scheduler wants of one step, and what the runner answers: no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tasuki.engine.api import TokenLogprob
from tasuki.engine.request import Request, SequenceState


@dataclass(slots=True)
class Row:
    """Some tokens of one sequence, to be computed in one step.

    Attributes:
        sequence: Whose.
        tokens: How many.
        start: Position of the first. One behind the sequence's known tokens:
            it is what the step before samples, still on its way.
        epoch: The sequence's when the row was planned; when it is another one
            at the step's end, the row's result is void.
        draft: Guesses of the tokens after its first one, part of `tokens` (drafts.py).
    """

    sequence: SequenceState
    tokens: int
    start: int
    epoch: int
    draft: Sequence[int] = ()

    @property
    def end(self) -> int:
        """Tokens of the sequence that have KV after the step, the whole draft included."""
        return self.start + self.tokens

    @property
    def void(self) -> bool:
        """Whether the sequence ended, or gave way, since the row was planned."""
        return self.epoch != self.sequence.epoch


@dataclass(slots=True)
class StepPlan:
    """One step.

    Attributes:
        rows: Those with one token first.
        num_decodes: How many leading rows have one token.
        prefill_tokens: Tokens of prefill chunks among the rows.
        prefill_squares: Sum over these chunks of end^2 - start^2: grows as their attention.
        kv_tokens: Tokens that the decodes attend to.
        draft_tokens: Of drafts. Such a step has no prefill chunks.
        copies: Blocks (from, to) to copy before anything is written.
        sources: Blocks that copies take from, and that nobody else may hold any
            more: one reference each is the step's.
        started: PREFILL legs whose first chunk is in this step.
        returned: DECODE legs that lost their blocks to older work.
    """

    rows: list[Row] = field(default_factory=list)
    num_decodes: int = 0
    prefill_tokens: int = 0
    prefill_squares: int = 0
    kv_tokens: int = 0
    draft_tokens: int = 0
    copies: list[tuple[int, int]] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    started: list[str] = field(default_factory=list)
    returned: list[Request] = field(default_factory=list)


@dataclass(slots=True)
class Draw:
    """One token to sample.

    Attributes:
        sequence: What it continues.
        choice: Which of its choices.
        position: Of the token in the output.
        drafted: Of a row with a draft, whose KV may be what its logits are not finite for.
    """

    sequence: SequenceState
    choice: int
    position: int
    drafted: bool = False

    @classmethod
    def next(cls, sequence: SequenceState, choice: int) -> Draw:
        """The token after those that are known."""
        return cls(sequence, choice, sequence.num_outputs)


@dataclass(slots=True)
class StepOutcome:
    """What the model and the sampler made of a plan.

    Attributes:
        draws: In the order of the plan's rows, then of choices, then of positions.
        tokens: One for each draw.
        logprobs: One for each draw; None for all when nobody asked.
        prompt_logprobs: New ones, in the order of positions, by sequence.
        failed: Sequences whose logits are not finite; their draws mean nothing.
        raised: Sequences that cannot be computed, and why; they have no draws.
        in_parts: Memory did not suffice for the step; it was computed in smaller ones.
    """

    draws: list[Draw]
    tokens: list[int]
    logprobs: list[TokenLogprob | None] | None = None
    prompt_logprobs: list[tuple[SequenceState, list[TokenLogprob]]] = field(default_factory=list)
    failed: list[SequenceState] = field(default_factory=list)
    raised: dict[SequenceState, Exception] = field(default_factory=dict)
    in_parts: bool = False
