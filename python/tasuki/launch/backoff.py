"""When to start a dead process again: pure, time is an argument."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BackoffPolicy:
    """Delays between restarts.

    Attributes:
        first_s: Before the first restart.
        cap_s: The longest delay.
        reset_after_s: A process that ran this long starts afresh at `first_s`.
    """

    first_s: float = 0.5
    cap_s: float = 10.0
    reset_after_s: float = 60.0


@dataclass(slots=True)
class Backoff:
    """The history of one process's deaths.

    Attributes:
        policy: The delays.
        deaths: In a row, none of them after a long run.
    """

    policy: BackoffPolicy
    deaths: int = 0

    def next_delay_s(self, ran_s: float) -> float:
        """Count one more death, after the process ran for `ran_s`, and give the delay."""
        if ran_s >= self.policy.reset_after_s:
            self.deaths = 0
        delay_s = min(self.policy.cap_s, self.policy.first_s * 2.0 ** min(self.deaths, 32))
        self.deaths += 1
        return delay_s
