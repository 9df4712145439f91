"""A recorder that computes again what CUDA would replay; results stay where they are."""

from __future__ import annotations

from collections.abc import Callable

from tasuki.execution.recorder import Outputs, Replay


class Recorder:
    """`tasuki.execution.recorder.Recorder` without CUDA: counts what it replays."""

    def __init__(self) -> None:
        self.replays = 0

    def record(self, work: Callable[[], Outputs], warm_ups: int = 0) -> tuple[Replay, Outputs]:
        outputs = work()

        def replay() -> None:
            self.replays += 1
            for target, value in zip(outputs, work(), strict=True):
                target.copy_(value)

        return replay, outputs
