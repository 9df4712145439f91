"""How the first rank has the others do as it does: told before it begins itself.

What fails between the telling and the end of the own launch leaves the ranks in
different places, each in a collective that the other never joins: then there is
no way on but a new start.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from tasuki.engine.errors import OutOfStepError
from tasuki.execution.step_header import StepHeader


class Followers(Protocol):
    """The other ranks' executors; none of these waits for them."""

    def run(self, header: StepHeader, slab: memoryview) -> None:
        """Compute a step whose arrays are these bytes."""

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks."""

    def scrub(self, blocks: Sequence[int], first_slot: int) -> None:
        """Overwrite blocks' slots from `first_slot` on with zeros."""


@contextmanager
def following(followers: Followers | None) -> Iterator[None]:
    """What raises inside ends the worker, if others follow.

    Raises:
        OutOfStepError: Some ranks did what others did not.
    """
    try:
        yield
    except Exception as error:
        if followers is None:
            raise
        raise OutOfStepError(
            f"the ranks are out of step, this worker must be started anew: {error!r}"
        ) from error
