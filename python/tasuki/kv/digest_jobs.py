"""The transfer thread's digests: of what pieces brought, and of our own blocks for a peer.

A piece that has arrived waits here until the next one is posted, so that the two overlap.
Transfer thread only; part of `puller.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tasuki.errors import TasukiError
from tasuki.kv.digest import UnitDigests, Values
from tasuki.kv.digester import Digester, Job
from tasuki.kv.effects import Digest, Digested
from tasuki.kv.transfer_plan import Run, TransferPlan
from tasuki.kv.transport import Transport

Deliver = Callable[["UnitDigests | None", str], None]  # digests, or why there are none


@dataclass(frozen=True, slots=True)
class _Arrived:
    """Runs that are here; of their units those in `check` get digests."""

    runs: Sequence[Run]
    check: frozenset[int]
    plan: TransferPlan
    deliver: Deliver


class DigestJobs:
    """Digests to compute and being computed.

    Args:
        transport: Registered; its pool is what digests are of.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._digester: Digester | None = None
        self._arrived: deque[_Arrived] = deque()
        self._jobs: list[tuple[Job, Callable[[Values], None]]] = []

    @property
    def waiting(self) -> bool:
        """Whether `begin` has something to do."""
        return bool(self._arrived)

    @property
    def busy(self) -> bool:
        """Whether `poll` has something to look at."""
        return bool(self._jobs)

    def arrived(
        self, runs: Sequence[Run], check: frozenset[int], plan: TransferPlan, deliver: Deliver
    ) -> None:
        """Runs of a pull are here: digests of their units in `check` are wanted."""
        self._arrived.append(_Arrived(runs, check, plan, deliver))

    def begin(self) -> bool:
        """Begin with the runs that arrived first. Returns whether there were any."""
        if not self._arrived:
            return False
        one = self._arrived.popleft()
        plan, deliver = one.plan, one.deliver
        units = [
            unit
            for run in one.runs
            for unit in range(run.local, run.local + run.count)
            if unit in one.check
        ]
        first = plan.first_head - self._transport.layout.pool.first_kv_head
        try:
            job = self._of_pool().start(units, plan.unit_tokens, first, plan.heads)
        except TasukiError as error:
            deliver(None, str(error))
            return True
        self._jobs.append((job, lambda v: deliver(UnitDigests(plan.first_head, units, v), "")))
        return True

    def own(self, order: Digest, report: Callable[[Digested], None]) -> None:
        """Begin with digests of our own blocks."""
        first = self._transport.layout.pool.first_kv_head
        try:
            job = self._of_pool().start(order.units, order.unit_tokens)
        except TasukiError as error:
            report(Digested(order.order_id, error=str(error)))
            return

        def deliver(values: Values) -> None:
            report(Digested(order.order_id, (UnitDigests(first, order.units, values),)))

        self._jobs.append((job, deliver))

    def poll(self) -> bool:
        """Deliver what is there. Returns whether anything was."""
        jobs, self._jobs = self._jobs, []
        for job, deliver in jobs:
            values = job()
            if values is None:
                self._jobs.append((job, deliver))
            else:
                deliver(values)
        return len(self._jobs) < len(jobs)

    def _of_pool(self) -> Digester:
        if self._digester is None:
            self._digester = Digester(self._transport.pool)
        return self._digester
