"""A line of the log now and then that says what the worker does. Engine thread."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from tasuki.engine.stats import EngineCounters, EngineLoad
from tasuki.kv.config import HandoffCounters

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class State:
    """What a line is made of."""

    load: EngineLoad
    counters: EngineCounters
    handoffs: HandoffCounters

    @property
    def idle(self) -> bool:
        """Nothing runs or waits."""
        return not (self.load.running_requests or self.load.waiting_requests)


class StateLog:
    """Writes a line each interval while there is work, and one when there is none any more.

    Args:
        interval_s: Between lines; 0: none is written.
        look: What is to be told. The counters in it must not change later.
    """

    def __init__(self, interval_s: float, look: Callable[[], State]) -> None:
        self._interval_s = interval_s
        self._look = look
        self._last = look()
        self._last_s: float | None = None
        self._was_idle = True

    def tick(self, now: float) -> None:
        """To be called about once a second.

        Args:
            now: Of a clock that only goes forward, in seconds.
        """
        if self._last_s is None:
            self._last_s = now
        elapsed_s = now - self._last_s
        if not self._interval_s or elapsed_s < self._interval_s:
            return
        state = self._look()
        worked = state.counters != self._last.counters or state.handoffs != self._last.handoffs
        if worked or not state.idle or not self._was_idle:
            log.info("%s", line(self._last, state, elapsed_s))
        self._last, self._last_s, self._was_idle = state, now, state.idle


def line(before: State, now: State, elapsed_s: float) -> str:
    """What is so now, and what was done since `before`.

    Args:
        before, now: Both ends of the time.
        elapsed_s: Between them.
    """
    load, counters, handoffs = now.load, now.counters, now.handoffs
    computed = counters.prompt_tokens_computed - before.counters.prompt_tokens_computed
    cached = counters.prompt_tokens_cached - before.counters.prompt_tokens_cached
    output = counters.output_tokens - before.counters.output_tokens
    used = load.total_blocks - load.free_blocks
    parts = [
        f"{load.running_requests} running",
        f"{load.waiting_requests} waiting ({load.waiting_prefill_tokens} prompt tokens)",
        f"{computed / elapsed_s:.0f} prompt tok/s",
        f"{output / elapsed_s:.0f} output tok/s",
        f"KV {used / load.total_blocks:.0%} of {load.total_blocks} blocks",
    ]
    if cached:
        parts.append(f"{cached / (computed + cached):.0%} of prompt tokens cached")
    if sent := handoffs.leases_granted - before.handoffs.leases_granted:
        parts.append(f"{sent} handed over")
    if taken := handoffs.kv_pulls - before.handoffs.kv_pulls:
        pulled = handoffs.kv_pulled_bytes - before.handoffs.kv_pulled_bytes
        parts.append(f"{taken} pulls, {pulled / elapsed_s / 1e6:.1f} MB/s of KV")
    if drafted := counters.draft_tokens - before.counters.draft_tokens:
        accepted = counters.accepted_draft_tokens - before.counters.accepted_draft_tokens
        parts.append(f"{accepted / drafted:.0%} of {drafted} draft tokens accepted")
    if preempted := counters.preemptions - before.counters.preemptions:
        parts.append(f"{preempted} preempted")
    return ("idle: " if now.idle else "") + ", ".join(parts)
