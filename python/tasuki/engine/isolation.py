"""A step that raises: find the request whose fault it is, so that the others go on. No torch.

The rows of such a step are computed again, each alone: KV is written to the
same slots again, and drawing is a function of the row. What raises alone fails
alone. When every request of the step raises, or single ones do again and
again, it is the worker that is broken: the error goes on and ends the process.
So does a worker whose logits are not finite, request after request.

A step that runs out of memory is nobody's fault: it is computed in halves, as small as
it takes, and the engine makes the next ones smaller (`step_size.py`).

A launch or sampling that raised is told apart at once (`Flight.error`) and taken care of at
its collection, when the step before is over and every token is known.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tasuki.engine.errors import DeviceMemoryError, GrammarError, NotFiniteError, OutOfStepError
from tasuki.engine.grammar_masks import StepMasks, make_masks
from tasuki.engine.mask_threads import MaskThreads
from tasuki.engine.plan import Row, StepOutcome, StepPlan
from tasuki.engine.request import SequenceState
from tasuki.engine.step_calls import LaunchedStep, Runner

log = logging.getLogger(__name__)

_MOST_IN_A_ROW = 10  # steps with nothing but a request that raises; requests without a number


@dataclass(slots=True)
class Flight:
    """A launched step.

    Attributes:
        plan: What was launched.
        planned_s: When its planning began.
        began_s: When the device could begin with it, at the earliest.
        work: What the inner runner made of it.
        masks: What it was sampled with; None: it is not sampled, or has no need of any.
        error: What launch or sampling raised; no step may be launched on top of it.
    """

    plan: StepPlan
    planned_s: float
    began_s: float
    work: Any = None
    masks: StepMasks | None = None
    error: Exception | None = None

    @property
    def needs_masks(self) -> bool:
        """Whether it is to be sampled with masks, and is not yet."""
        return self.error is None and self.masks is None and bool(self.work.constrained)


class IsolatingRunner:
    """Steps of a `Runner`, whose errors it pins on requests; makes the masks for `sample`."""

    def __init__(self, inner: Runner) -> None:
        self._inner = inner
        self._mask_threads = MaskThreads()
        self.longest_masks_s = self._mask_threads.longest_s
        self._in_a_row = 0
        self._not_finite: set[str] = set()  # requests since the last finite logits

    def launch(self, plan: StepPlan, now_s: float) -> Flight:
        """As the inner runner; what it raises waits for `collect`."""
        try:
            return Flight(plan, now_s, now_s, self._inner.launch(plan))
        except Exception as error:
            return Flight(plan, now_s, now_s, error=error)

    def sample(self, flight: Flight) -> None:
        """Make the masks of a launched step and have it sampled, if it waits for that.

        The step before it is collected. What is raised waits for `collect`.
        """
        if not flight.needs_masks:
            return
        void = {row.sequence for row in flight.plan.rows if row.void}
        try:
            flight.masks = self._sample(flight.work, void)
        except Exception as error:
            flight.error = error

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
            outcome = self._outcome(flight.work, flight.masks)
        else:
            if isinstance(flight.error, OutOfStepError):
                raise flight.error
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

    def scrub(self, blocks: Sequence[int], first_slot: int = 0) -> None:
        """Overwrite the blocks' slots from `first_slot` on with zeros."""
        self._inner.scrub(blocks, first_slot)

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
        """Each row in a step of its own; the plan's copies came first and are made already.

        Raises:
            OutOfStepError: The ranks cannot compute anything together any more.
        """
        result = StepOutcome([], [])
        for row in rows:
            try:
                _add(result, self._run([row]))
            except OutOfStepError:
                raise
            except Exception as error:
                result.raised[row.sequence] = error
        return result

    def _in_parts(self, rows: list[Row], copies: list[tuple[int, int]]) -> StepOutcome:
        """The rows in steps that are as small as memory demands, the copies before the first.

        Raises:
            DeviceMemoryError: Not even one row of one token fits.
            OutOfStepError: The ranks cannot compute anything together any more.
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
            except OutOfStepError:
                raise
            except Exception:
                log.exception("a part of a step raised")
                outcome = self._one_by_one(part)
            copies = []
            _add(result, outcome)
        return result

    def _run(self, rows: list[Row], copies: list[tuple[int, int]] | None = None) -> StepOutcome:
        singles = sum(row.tokens == 1 for row in rows)
        plan = StepPlan(rows=rows, num_decodes=singles, copies=copies or [])
        launched = self._inner.launch(plan)
        masks = self._sample(launched) if launched.constrained else None
        return self._outcome(launched, masks)

    def _sample(self, launched: LaunchedStep, void: Collection[SequenceState] = ()) -> StepMasks:
        masks = make_masks(launched.draws, launched.constrained, self._mask_threads, void)
        self._inner.sample(launched, masks)
        return masks

    def _outcome(self, launched: LaunchedStep, masks: StepMasks | None) -> StepOutcome:
        outcome = self._inner.collect(launched)
        if masks is not None:
            outcome.raised |= masks.refused(outcome.draws, outcome.tokens)
        return outcome


def _halves(rows: list[Row]) -> list[list[Row]]:
    """Two steps for one: of half of the rows, or of the tokens of a single row; [] if neither.

    A draft is dropped.
    """
    if len(rows) > 1:
        middle = len(rows) // 2
        return [rows[:middle], rows[middle:]]
    if not rows or rows[0].tokens == 1:
        return []
    [row] = rows
    if row.draft:
        return [[replace(row, tokens=1, draft=())]]
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
