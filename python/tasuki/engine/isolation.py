"""A step that raises: find the request whose fault it is, so that the others go on. No torch.

The rows of such a step are computed again, each alone: KV is written to the
same slots again, and drawing is a function of the row. What raises alone fails
alone. When every request of the step raises, or single ones do again and
again, it is the worker that is broken: the error goes on and ends the process.
"""

from __future__ import annotations

import logging

from tasuki.engine.api import TokenLogprob
from tasuki.engine.plan import Runner, StepOutcome, StepPlan

log = logging.getLogger(__name__)

_MOST_IN_A_ROW = 10  # steps with nothing but a request that raises


class IsolatingRunner:
    """A `Runner` around another one, whose errors it pins on requests."""

    def __init__(self, inner: Runner) -> None:
        self._inner = inner
        self._in_a_row = 0

    def execute(self, plan: StepPlan) -> StepOutcome:
        """As the inner runner; sequences that raise are in the outcome's `raised`.

        Raises:
            Exception: What the inner one raised, when it is not one request's fault.
        """
        try:
            outcome = self._inner.execute(plan)
        except Exception:
            log.exception("a step raised: its %d rows are computed one by one", len(plan.rows))
            outcome = self._one_by_one(plan)
            if len(outcome.raised) == len(plan.rows):
                self._in_a_row += 1
                broken = len({sequence.request for sequence in outcome.raised}) > 1
                if broken or self._in_a_row == _MOST_IN_A_ROW:
                    raise
                return outcome
        self._in_a_row = 0
        return outcome

    def scrub(self, blocks: list[int]) -> None:
        """Overwrite the blocks with zeros."""
        self._inner.scrub(blocks)

    def _one_by_one(self, plan: StepPlan) -> StepOutcome:
        """Each row in a step of its own; the plan's copies came first and are made already."""
        result = StepOutcome([], [])
        logprobs: list[TokenLogprob | None] = []
        for row in plan.rows:
            sequence, tokens = row
            try:
                alone = self._inner.execute(StepPlan(rows=[row], num_decodes=int(tokens == 1)))
            except Exception as error:
                result.raised[sequence] = error
                continue
            result.draws += alone.draws
            result.tokens += alone.tokens
            logprobs += alone.logprobs or [None] * len(alone.tokens)
            result.prompt_logprobs += alone.prompt_logprobs
            result.failed += alone.failed
        if any(entry is not None for entry in logprobs):
            result.logprobs = logprobs
        return result
