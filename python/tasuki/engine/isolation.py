"""A step that raises: find the request whose fault it is, so that the others go on. No torch.

The rows of such a step are computed again, each alone: KV is written to the
same slots again, and drawing is a function of the row. What raises alone fails
alone. When every request of the step raises, or single ones do again and
again, it is the worker that is broken: the error goes on and ends the process.
So does a worker whose logits are not finite, request after request.

A step that runs out of memory is nobody's fault: it is computed in halves, as small as
it takes, and the engine makes the next ones smaller (`relief.py`).

A launch that raised is told apart at once (`Flight.error`) and taken care of at
its collection, when the step before is over and every token is known.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tasuki.engine.errors import DeviceMemoryError, GrammarError, NotFiniteError, OutOfStepError
from tasuki.engine.plan import Row, Runner, StepOutcome, StepPlan

log = logging.getLogger(__name__)

_MOST_IN_A_ROW = 10  # steps with nothing but a request that raises; requests without a number


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

    @property
    def waited_s(self) -> float:
        """How long its launch waited for the step before it."""
        return getattr(self.work, "waited_s", 0.0)


class IsolatingRunner:
    """Launches and collects on a `Runner`, whose errors it pins on requests."""

    def __init__(self, inner: Runner) -> None:
        self._inner = inner
        self._in_a_row = 0
        self._not_finite: set[str] = set()  # requests since the last finite logits

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
            NotFiniteError: Request after request has logits that are not finite.
        """
        outcome = self._collect(flight)
        self._note_finite(outcome)
        return outcome

    def _collect(self, flight: Flight) -> StepOutcome:
        if flight.error is None:
            outcome = self._inner.collect(flight.work)
        else:
            if isinstance(flight.error, OutOfStepError):
                raise flight.error  # the ranks cannot compute anything together any more
            rows = [row for row in flight.plan.rows if not row.void]
            if isinstance(flight.error, DeviceMemoryError):
                log.warning("out of memory: computed in parts: %s", flight.error)
                return self._in_parts(rows, flight.plan.copies)
            log.error(
                "a step raised: its %d rows are computed one by one",
                len(rows),
                exc_info=flight.error,
            )
            outcome = self._one_by_one(rows)
            raised = [s for s, e in outcome.raised.items() if not isinstance(e, GrammarError)]
            if rows and len(raised) == len(rows):
                self._in_a_row += 1
                broken = len({sequence.request for sequence in raised}) > 1
                if broken or self._in_a_row == _MOST_IN_A_ROW:
                    raise flight.error
                return outcome
        self._in_a_row = 0
        return outcome

    def scrub(self, blocks: list[int]) -> None:
        """Overwrite the blocks with zeros."""
        self._inner.scrub(blocks)

    def _note_finite(self, outcome: StepOutcome) -> None:
        failed = set(outcome.failed)
        if any(draw.sequence not in failed for draw in outcome.draws):
            self._not_finite.clear()
            return
        self._not_finite.update(sequence.request.request_id for sequence in failed)
        if len(self._not_finite) >= _MOST_IN_A_ROW:
            raise NotFiniteError(
                f"the logits of the last {len(self._not_finite)} requests are not finite, and no"
                " other's were in between: the weights or the device are broken, or bfloat16"
                " overflows (--dtype float32)"
            )

    def _one_by_one(self, rows: Sequence[Row]) -> StepOutcome:
        """Each row in a step of its own; the plan's copies came first and are made already."""
        result = StepOutcome([], [])
        for row in rows:
            try:
                _add(result, self._run([row]))
            except Exception as error:
                result.raised[row.sequence] = error
        return result

    def _in_parts(self, rows: list[Row], copies: list[tuple[int, int]]) -> StepOutcome:
        """The rows in steps that are as small as memory demands, the copies before the first.

        Raises:
            DeviceMemoryError: Not even one row of one token fits.
        """
        result = StepOutcome([], [], in_parts=True)
        parts = _halves(rows) or [rows]
        while parts:
            part = parts.pop(0)
            try:
                outcome = self._run(part, copies)
            except DeviceMemoryError:
                if not (smaller := _halves(part)):
                    raise
                parts = smaller + parts
                continue
            except Exception:
                log.exception("a part of a step raised")
                outcome = self._one_by_one(part)
            copies = []
            _add(result, outcome)
        return result

    def _run(self, rows: list[Row], copies: list[tuple[int, int]] | None = None) -> StepOutcome:
        singles = sum(row.tokens == 1 for row in rows)
        plan = StepPlan(rows=rows, num_decodes=singles, copies=copies or [])
        return self._inner.collect(self._inner.launch(plan))


def _halves(rows: list[Row]) -> list[list[Row]]:
    """Two steps for one: of half of the rows, or of the tokens of a single row; [] if neither."""
    if len(rows) > 1:
        middle = len(rows) // 2
        return [rows[:middle], rows[middle:]]
    if not rows or rows[0].tokens == 1:
        return []
    [row] = rows
    half = row.tokens // 2
    second = replace(row, tokens=row.tokens - half, start=row.start + half)
    return [[replace(row, tokens=half)], [second]]


def _add(result: StepOutcome, outcome: StepOutcome) -> None:
    """Append what one part of a step came to."""
    if outcome.logprobs is not None and result.logprobs is None:
        result.logprobs = [None] * len(result.tokens)
    if result.logprobs is not None:
        result.logprobs += outcome.logprobs or [None] * len(outcome.tokens)
    result.draws += outcome.draws
    result.tokens += outcome.tokens
    result.prompt_logprobs += outcome.prompt_logprobs
    result.failed += outcome.failed
    result.raised |= outcome.raised
