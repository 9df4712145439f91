"""How the engine has a step computed: three calls, and what lies between them. No torch.

launch(plan)          sample(masks)             collect()
copies, forward       only where a draw         waits for the tokens
                      has a grammar
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from tasuki.engine.grammar_masks import StepMasks
from tasuki.engine.plan import Draw, StepOutcome, StepPlan


class LaunchedStep(Protocol):
    """A step on its way."""

    @property
    def draws(self) -> list[Draw]:
        """What it samples."""

    @property
    def constrained(self) -> Sequence[int]:
        """Draws with a grammar, by index. With any, only `Runner.sample` has it sampled."""


class Runner(Protocol):
    """Computes plans. `runner.ModelRunner` is the real one.

    When a step is launched at most one other may be uncollected, and that one is sampled.
    Only `collect` waits for the device.
    """

    def launch(self, plan: StepPlan) -> Any:
        """Have the device copy blocks and run the model; sample too, if no draw has a grammar.

        Rows that start one token behind what is known of their sequence take that token
        from the step in flight.

        Returns:
            A `LaunchedStep`, for the calls below.

        Raises:
            DeviceMemoryError: The step does not fit; nothing of it counts.
        """

    def sample(self, launched: Any, masks: StepMasks) -> None:
        """Have a launched step sampled that has constrained draws.

        Raises:
            DeviceMemoryError: As `launch`.
        """

    def landed(self, launched: Any) -> bool:
        """Whether `collect` would not wait."""

    def collect(self, launched: Any) -> StepOutcome:
        """Wait for a step that is sampled. All KV of its plan is final then."""

    def scrub(self, blocks: Sequence[int], first_slot: int = 0) -> None:
        """Overwrite blocks' slots from `first_slot` on with zeros, after all that is launched."""
