"""What the scheduler wants of one step, and what the runner answers: no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from tasuki.engine.api import TokenLogprob
from tasuki.engine.request import Request, SequenceState


@dataclass(slots=True)
class StepPlan:
    """One step.

    Attributes:
        rows: Sequences and how many of their next tokens to compute; those
            with one token first.
        num_decodes: How many leading rows have one token.
        prefill_tokens: Tokens of prefill chunks among the rows.
        copies: Blocks (from, to) to copy before anything is written.
        started: PREFILL legs whose first chunk is in this step.
        returned: DECODE legs that lost their blocks to older work.
    """

    rows: list[tuple[SequenceState, int]] = field(default_factory=list)
    num_decodes: int = 0
    prefill_tokens: int = 0
    copies: list[tuple[int, int]] = field(default_factory=list)
    started: list[str] = field(default_factory=list)
    returned: list[Request] = field(default_factory=list)


@dataclass(slots=True)
class Draw:
    """One token to sample: for this choice of this sequence."""

    sequence: SequenceState
    choice: int


@dataclass(slots=True)
class StepOutcome:
    """What the model and the sampler made of a plan.

    Attributes:
        draws: In the order of the plan's rows, then of choices.
        tokens: One for each draw.
        logprobs: One for each draw; None for all when nobody asked.
        prompt_logprobs: New ones, in the order of positions, by sequence.
        failed: Sequences whose logits are not finite; their draws mean nothing.
        raised: Sequences that cannot be computed, and why; they have no draws.
    """

    draws: list[Draw]
    tokens: list[int]
    logprobs: list[TokenLogprob | None] | None = None
    prompt_logprobs: list[tuple[SequenceState, list[TokenLogprob]]] = field(default_factory=list)
    failed: list[SequenceState] = field(default_factory=list)
    raised: dict[SequenceState, Exception] = field(default_factory=dict)


class Runner(Protocol):
    """Computes plans. `runner.ModelRunner` is the real one."""

    def execute(self, plan: StepPlan) -> StepOutcome:
        """Copy blocks, run the model, sample. When it returns, all KV of the plan is final."""

    def scrub(self, blocks: list[int]) -> None:
        """Overwrite the blocks with zeros."""
