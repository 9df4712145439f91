"""Carries out a schedule of faults on a deployment under load."""

from __future__ import annotations

import contextlib
import dataclasses
import heapq
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from support.chaos.schedule import Fault, Kind
from support.deployment import Deployment
from support.waiting import until

AT_WORK_S = 2.0
"""So long a fault waits for its worker to have a part of a request."""
READY_S = 90.0
"""A worker's start, on a busy machine."""


@dataclass(frozen=True)
class Done:
    """A fault that was carried out.

    Attributes:
        fault: as planned, except that it may have hit another worker.
        at_s: since the load began.
        legs: parts of requests that the router had on the worker.
    """

    fault: Fault
    at_s: float
    legs: int


class Conductor:
    """Hurts workers and takes it back.

    Args:
        deployment: whose router has relays in front of its workers.
        admin_port: of the router's admin API.
    """

    def __init__(self, deployment: Deployment, admin_port: int) -> None:
        self._deployment = deployment
        self._admin = httpx.Client(base_url=f"http://127.0.0.1:{admin_port}", trust_env=False)
        self._numbers = {name: str(i) for i, name in enumerate(deployment.workers)}
        self._repairs: list[tuple[float, int, Callable[[], bool]]] = []
        self._count = 0
        self._ended: set[str] = set()  # and not started again: the router may not know it yet
        self.done: list[Done] = []

    def run(self, schedule: Sequence[Fault]) -> list[Done]:
        """Carries out every fault, later than planned where the machine is slow.

        Returns when everything is taken back and every worker is ready again.
        """
        begin_s = time.monotonic()
        for fault in schedule:
            while time.monotonic() - begin_s < fault.at_s:
                self._repair()
                time.sleep(0.02)
            self._until(lambda fault=fault: self._may_hit(fault.worker), f"workers before {fault}")
            fault, legs = self._aimed(fault)
            self._act(fault)
            self.done.append(Done(fault, round(time.monotonic() - begin_s, 2), legs))
        self._until(lambda: not self._repairs and self._ready() == set(self._numbers), "the end")
        return self.done

    def close(self) -> None:
        self._admin.close()

    def workers(self) -> list[dict[str, Any]]:
        """The admin API's list."""
        found: list[dict[str, Any]] = self._admin.get("/workers").json()["workers"]
        return found

    def _aimed(self, fault: Fault) -> tuple[Fault, int]:
        """The fault, and the parts of requests on the worker that it is to hit.

        That is another worker than planned if the planned one gets no request for a while.
        """
        with contextlib.suppress(TimeoutError):
            self._until(lambda: self._legs()[fault.worker] > 0, "", AT_WORK_S)
        legs = self._legs()
        by_work = sorted(legs, key=lambda name: legs[name], reverse=True)
        may_hit = (name for name in [fault.worker, *by_work] if legs[name] and self._may_hit(name))
        name = next(may_hit, fault.worker)
        return dataclasses.replace(fault, worker=name), legs[name]

    def _legs(self) -> dict[str, int]:
        counts = (int(worker["legs"]) for worker in self.workers())
        return dict(zip(self._numbers, counts, strict=True))

    def _ready(self) -> set[str]:
        states = [worker["state"] for worker in self.workers()]
        return {name for name, state in zip(self._numbers, states, strict=True) if state == "ready"}

    def _may_hit(self, name: str) -> bool:
        """Whether the worker is well, and half of all workers besides, with each role."""
        ready = self._ready() - self._ended
        left = ready - {name}
        roles = {each.partition("-")[0] for each in self._numbers}
        enough = 2 * len(left) >= len(self._numbers)
        return name in ready and enough and {each.partition("-")[0] for each in left} == roles

    def _until(self, probe: Callable[[], bool], what: str, deadline_s: float = READY_S) -> None:
        def repair_and_probe() -> bool:
            self._repair()
            return probe()

        until(repair_and_probe, lambda: f"{what}: {self.workers()}", deadline_s=deadline_s)

    def _later(self, seconds: float, repair: Callable[[], bool]) -> None:
        self._count += 1
        heapq.heappush(self._repairs, (time.monotonic() + seconds, self._count, repair))

    def _repair(self) -> None:
        """Takes back what is due; what cannot be yet is tried again."""
        while self._repairs and self._repairs[0][0] <= time.monotonic():
            *_, repair = heapq.heappop(self._repairs)
            if not repair():
                self._later(0.1, repair)
                return

    def _act(self, fault: Fault) -> None:
        deployment, name = self._deployment, fault.worker
        process, relay = deployment.workers[name].process, deployment.relays[name]

        def start() -> bool:
            if process.exit_code() is None:
                return False
            deployment.restart(name, wait=False)
            self._ended.remove(name)
            return True

        def go_on() -> bool:
            deployment.continue_process(name)
            return True

        def come_back() -> bool:
            relay.come_back()
            return True

        match fault.kind:
            case Kind.KILL:
                deployment.kill(name)
                self._ended.add(name)
                self._later(fault.for_s, start)
            case Kind.RESTART:
                process.signal(signal.SIGTERM)
                self._ended.add(name)
                self._later(fault.for_s, start)
            case Kind.PAUSE | Kind.SUSPECT | Kind.FREEZE:
                deployment.stop_process(name)
                self._later(fault.for_s, go_on)
            case Kind.DRAIN:
                self._order(name, "drain")
                self._later(fault.for_s, lambda: self._order(name, "undrain"))
            case Kind.RESET:
                assert relay.reset() > 0, f"the router was not connected to {name}"
            case Kind.VANISH:
                relay.vanish()
                self._later(fault.for_s, come_back)

    def _order(self, name: str, order: str) -> bool:
        answer = self._admin.post(f"/workers/{self._numbers[name]}/{order}")
        assert answer.status_code == 200, answer.text
        return True
