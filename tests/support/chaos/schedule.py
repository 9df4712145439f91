"""Which fault hits which worker when: a function of the seed.

Faults overlap. At any time at least one worker of each role, and half of all, are left alone,
so that every request can be served.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Sequence
from dataclasses import dataclass

SUSPECT_S = 4.0
"""A worker silent for so long gets no new work: `Liveness::suspect_after` of the router."""
LOST_S = 10.0
"""A worker that answers no ping for so long is lost: ping interval plus ping timeout there."""
_PAUSE_S = (0.6, 2.4)
"""Between two faults."""


class Kind(enum.Enum):
    """What is done to a worker, and for how long."""

    KILL = "kill"
    """SIGKILL, and a new start after the time."""
    RESTART = "restart"
    """SIGTERM, and a new start after the time."""
    PAUSE = "pause"
    """SIGSTOP and SIGCONT, before the router notices."""
    SUSPECT = "suspect"
    """SIGSTOP and SIGCONT, after the router gives it no more work."""
    FREEZE = "freeze"
    """SIGSTOP and SIGCONT, after the router gives it up."""
    DRAIN = "drain"
    """Drained by the admin API, and undrained."""
    RESET = "reset"
    """Its connections with the router are reset."""
    VANISH = "vanish"
    """Its connections with the router end without a sign: nothing passes for the time."""


_TIMES_S = {
    Kind.KILL: (0.0, 4.0),
    Kind.RESTART: (0.0, 3.0),
    Kind.PAUSE: (0.3, 0.8 * SUSPECT_S),
    Kind.SUSPECT: (1.2 * SUSPECT_S, 0.8 * LOST_S),
    Kind.FREEZE: (1.2 * LOST_S, 1.5 * LOST_S),
    Kind.DRAIN: (1.0, 5.0),
    Kind.RESET: (0.0, 0.0),
    Kind.VANISH: (1.2 * LOST_S, 1.5 * LOST_S),
}
_RECOVERY_S = {Kind.KILL: 6.0, Kind.RESTART: 6.0}
_OTHER_RECOVERY_S = 2.0
# After every kind has come once: how often each is drawn.
_WEIGHTS = {Kind.FREEZE: 1, Kind.VANISH: 1, Kind.SUSPECT: 2}
_OTHER_WEIGHT = 4


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        at_s: since the load began; later if the deployment still recovers from others.
        kind: what is done.
        worker: to whom, e.g. `decode-0`.
        for_s: until it is taken back.
    """

    at_s: float
    kind: Kind
    worker: str
    for_s: float

    def __str__(self) -> str:
        return f"Fault({self.at_s}, {self.kind}, {self.worker!r}, {self.for_s}),"


def faults(seed: int, seconds: float, workers: Sequence[str]) -> list[Fault]:
    """A schedule: every kind once in random order, then kinds by weight.

    Args:
        seed: of everything that is drawn.
        seconds: no fault after that, once every kind has come.
        workers: names, `ROLE-NUMBER`.
    """
    draw = random.Random(seed)
    first = draw.sample(list(Kind), len(Kind))
    weights = [_WEIGHTS.get(kind, _OTHER_WEIGHT) for kind in Kind]
    busy_until = dict.fromkeys(workers, 0.0)
    schedule: list[Fault] = []
    at_s = 1.0
    while first or at_s < seconds:
        free = [name for name in workers if busy_until[name] <= at_s]
        may_hit = [name for name in free if _leaves_enough(free, name, workers)]
        if may_hit:
            kind = first.pop() if first else draw.choices(list(Kind), weights)[0]
            name = draw.choice(may_hit)
            for_s = round(draw.uniform(*_TIMES_S[kind]), 2)
            busy_until[name] = at_s + for_s + _RECOVERY_S.get(kind, _OTHER_RECOVERY_S)
            schedule.append(Fault(round(at_s, 2), kind, name, for_s))
        at_s += draw.uniform(*_PAUSE_S)
    return schedule


def _leaves_enough(free: Sequence[str], name: str, workers: Sequence[str]) -> bool:
    left = [each for each in free if each != name]
    roles = {each.partition("-")[0] for each in left}
    return 2 * len(left) >= len(workers) and roles == {w.partition("-")[0] for w in workers}
