"""Clients of every manner, each asking one request after another, and what came of them."""

from __future__ import annotations

import asyncio
import random
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from support.chaos.asking import Asking, LostError, Manner, ask
from support.chaos.cases import Case, difference

_MANNERS = {
    Manner.STREAM: 5,
    Manner.WHOLE: 4,
    Manner.SLOW: 2,
    Manner.LEAVE: 2,
    Manner.RESET: 2,
}
_SLOW_PAUSE_S = (0.01, 0.08)
_GIVE_UP_S = (0.005, 1.0)
_GIVE_UP_TOKENS = (1, 40)


@dataclass
class Outcome:
    """One request that was answered, given up or lost.

    Attributes:
        case: its name.
        asking: how it was asked.
        begun_s: since the load began.
        took_s: until its end.
        answered: the whole answer came.
        trouble: what is wrong with it; empty: nothing.
    """

    case: str
    asking: Asking
    begun_s: float
    took_s: float
    answered: bool = False
    trouble: str = ""

    def __str__(self) -> str:
        when = f"at {self.begun_s:.1f} s for {self.took_s:.1f} s"
        return f"{self.case} {self.asking} {when}: {self.trouble}"


@dataclass
class Tally:
    """What became of all requests."""

    outcomes: list[Outcome] = field(default_factory=list)

    def troubles(self) -> list[str]:
        return [str(outcome) for outcome in self.outcomes if outcome.trouble]

    def by_manner(self) -> dict[str, int]:
        counts = Counter(outcome.asking.manner.value for outcome in self.outcomes)
        counts["given up"] = sum(not each.answered for each in self.outcomes)
        return dict(sorted(counts.items()))

    def kinds(self) -> set[str]:
        """Kinds of the requests that were answered."""
        return {each.case.rpartition("-")[0] for each in self.outcomes if each.answered}

    def longest(self) -> Outcome:
        return max(self.outcomes, key=lambda outcome: outcome.took_s)

    def median_s(self) -> float:
        return statistics.median(each.took_s for each in self.outcomes if each.answered)


class Load:
    """Asks from construction to `end`, on an event loop and a thread of its own.

    Args:
        port: of the router; called for each request where routers come and go.
        cases: the requests to ask.
        clients: how many ask at once.
        seed: of what they ask, and how.
    """

    def __init__(
        self, port: int | Callable[[], int], cases: Sequence[Case], clients: int, seed: int
    ) -> None:
        self._port = port if callable(port) else lambda: port
        self._cases, self._clients, self._seed = cases, clients, seed
        self._over = False
        self._begin_s = time.monotonic()
        self.tally = Tally()
        self.asked = 0
        self._thread = threading.Thread(target=lambda: asyncio.run(self._ask_all()), daemon=True)
        self._thread.start()

    def end(self, deadline_s: float) -> Tally:
        """Begins no more requests, and waits for the others.

        Raises:
            TimeoutError: some do not end.
        """
        self._over = True
        self._thread.join(deadline_s)
        if self._thread.is_alive():
            left = self.asked - len(self.tally.outcomes)
            raise TimeoutError(f"{left} requests have not ended within {deadline_s:g} s")
        return self.tally

    async def _ask_all(self) -> None:
        await asyncio.gather(*(self._client(number) for number in range(self._clients)))

    async def _client(self, number: int) -> None:
        draw = random.Random(f"{self._seed}/{number}")
        while not self._over:
            case = draw.choice(self._cases)
            asking = _asking(draw)
            self.asked += 1
            outcome = Outcome(case.name, asking, time.monotonic() - self._begin_s, 0.0)
            try:
                document = await ask(self._port(), case.path, case.body, asking)
            except LostError as error:
                outcome.trouble = f"lost: {error}"
            else:
                if document is not None:
                    outcome.answered = True
                    wrong = difference(document, case.answer)
                    outcome.trouble = f"wrong: {wrong}" if wrong else ""
            outcome.took_s = time.monotonic() - self._begin_s - outcome.begun_s
            self.tally.outcomes.append(outcome)


def _asking(draw: random.Random) -> Asking:
    manner = draw.choices(list(_MANNERS), list(_MANNERS.values()))[0]
    if manner is Manner.SLOW:
        return Asking(manner, pause_s=draw.uniform(*_SLOW_PAUSE_S))
    if manner.gives_up:
        return Asking(
            manner,
            pause_s=draw.uniform(*_GIVE_UP_S),
            after=draw.randint(*_GIVE_UP_TOKENS),
            stream=draw.random() < 0.6,
        )
    return Asking(manner)
