"""A step that raises: find the request whose fault it is, so that the others go on. No torch.

The rows of such a step are computed again, each alone: KV is written to the
same slots again, and drawing is a function of the row. What raises alone fails
alone. When every request of the step raises, or single ones do again and
again, it is the worker that is broken: the error goes on and ends the process.

A launch that raised is told apart at once (`Flight.error`) and taken care of at
its collection, when the step before is over and every token is known.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from tasuki.engine.api import TokenLogprob
from tasuki.engine.errors import OutOfStepError
from tasuki.engine.plan import Runner, StepOutcome, StepPlan

log = logging.getLogger(__name__)

_MOST_IN_A_ROW = 10  # steps with nothing but a request that raises


@dataclass(slots=True)
class Flight:
    """A launched step.

    Attributes:
        plan: What was launched.
        began_s: When the device could begin with it, at the earliest.
        work: What the inner runner made of it.
        error: What its launch raised; no step may be launched on top of it.
    """

    plan: StepPlan
    began_s: float
    work: Any = None
    error: Exception | None = None


class IsolatingRunner:
    """Launches and collects on a `Runner`, whose errors it pins on requests."""

    def __init__(self, inner: Runner) -> None:
        self._inner = inner
        self._in_a_row = 0

    def launch(self, plan: StepPlan, now_s: float) -> Flight:
        """As the inner runner; what it raises waits for `collect`."""
        try:
            return Flight(plan, now_s, self._inner.launch(plan))
        except Exception as error:
            return Flight(plan, now_s, error=error)

    def landed(self, flight: Flight) -> bool:
        """Whether `collect` would not wait for the device."""
        return flight.error is not None or self._inner.landed(flight.work)

    def collect(self, flight: Flight) -> StepOutcome:
        """As the inner runner; sequences that raise are in the outcome's `raised`.

        Raises:
            Exception: What the inner one raised, when it is not one request's fault.
        """
        if flight.error is None:
            outcome = self._inner.collect(flight.work)
        else:
            if isinstance(flight.error, OutOfStepError):
                raise flight.error  # the ranks cannot compute anything together any more
            rows = [row for row in flight.plan.rows if not row.void]
            log.error(
                "a step raised: its %d rows are computed one by one",
                len(rows),
                exc_info=flight.error,
            )
            outcome = self._one_by_one(StepPlan(rows=rows))
            if rows and len(outcome.raised) == len(rows):
                self._in_a_row += 1
                broken = len({sequence.request for sequence in outcome.raised}) > 1
                if broken or self._in_a_row == _MOST_IN_A_ROW:
                    raise flight.error
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
            try:
                alone = self._inner.collect(
                    self._inner.launch(StepPlan(rows=[row], num_decodes=int(row.tokens == 1)))
                )
            except Exception as error:
                result.raised[row.sequence] = error
                continue
            result.draws += alone.draws
            result.tokens += alone.tokens
            logprobs += alone.logprobs or [None] * len(alone.tokens)
            result.prompt_logprobs += alone.prompt_logprobs
            result.failed += alone.failed
        if any(entry is not None for entry in logprobs):
            result.logprobs = logprobs
        return result
