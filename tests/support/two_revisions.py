"""Workers and routers of two revisions of Tasuki together, each from its own checkout.

Workers come and go by the file that the routers read; clients find a router as behind a load
balancer, by its readiness. Nothing here restarts what ends.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from support.deployment import MODEL_NAME, ROLE_PREFERENCE, START_DEADLINE_S
from support.metrics import Metrics
from support.processes import REPOSITORY, Process
from support.waiting import free_port, until

DRAIN_S = 300.0
"""Longer than any test here takes: what ends before has drained."""
GRACE_S = 2.0
"""For which a router serves on after it has said that it is not ready."""


@dataclass(frozen=True)
class Revision:
    """One revision of Tasuki.

    Attributes:
        name: a tag or commit.
        folder: its checkout, with the extension built.
    """

    name: str
    folder: Path

    def runs_in(self, pid: int) -> bool:
        """Whether a process has loaded this revision's extension."""
        files = {os.path.realpath(each.path) for each in psutil.Process(pid).memory_maps()}
        return os.path.realpath(self.folder / "python/tasuki/_native.abi3.so") in files


HEAD = Revision("head", REPOSITORY)


@dataclass
class Member:
    """A worker or a router.

    Attributes:
        port: of a worker for gRPC, of a router for clients.
        admin_port: of a router.
    """

    name: str
    role: str
    revision: Revision
    process: Process
    port: int
    admin_port: int = 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def wait_ready(self, beginning: str = "ready ") -> str:
        said = self.process.wait_for_line(beginning, deadline_s=START_DEADLINE_S)
        assert self.revision.runs_in(self.process.pid), f"{self.name} is not {self.revision.name}"
        return said


@dataclass
class Fleet:
    """What runs now.

    Args:
        model: folder.
        folder: of the logs and of the file with the workers' addresses.
        worker: further arguments of every worker.
        router: further arguments of every router.
    """

    model: Path
    folder: Path
    worker: Sequence[str] = ("--kv-memory", "64000000", "--max-batched-tokens", "256")
    router: Sequence[str] = ()
    workers: list[Member] = field(default_factory=list)
    routers: list[Member] = field(default_factory=list)
    ended_routers: list[Member] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _turns: Iterator[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self._list()

    # -- starting --

    def add_workers(self, *wanted: tuple[str, Revision], ports: Sequence[int] = ()) -> list[Member]:
        """Starts workers of these roles and revisions; lists them when they are ready."""
        started = []
        for at, (role, revision) in enumerate(wanted):
            name = f"{role}-{next(self._numbers)}-{revision.name}"
            port = ports[at] if ports else free_port()
            arguments = ["worker", "--model", str(self.model), "--name", name, "--role", role]
            arguments += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
            arguments += ["--drain-s", str(DRAIN_S), *self.worker]
            started.append(self._start(name, role, revision, arguments, port))
        self.workers += started
        for member in started:
            member.wait_ready()
        self._list()
        return started

    def add_router(self, revision: Revision, workers: Sequence[Member] = ()) -> Member:
        """Starts a router before some workers, or before all that are listed at any time."""
        admin_port = free_port()
        arguments = ["router", "--host", "127.0.0.1", "--port", "0", "--model", str(self.model)]
        arguments += ["--served-model-name", MODEL_NAME, "--admin-port", str(admin_port)]
        arguments += ["--role-preference", str(ROLE_PREFERENCE), "--drain-s", str(DRAIN_S)]
        arguments += ["--readiness-grace-s", str(GRACE_S), *self.router]
        for worker in workers:
            arguments += ["--worker", worker.address]
        if not workers:
            arguments += ["--discover", f"file:{self._file}"]
        name = f"router-{next(self._numbers)}-{revision.name}"
        router = self._start(name, "router", revision, arguments, 0)
        router.admin_port = admin_port
        try:
            router.port = int(router.wait_ready("listening on ").rpartition(":")[2])
            self.wait_known(router, workers or self.workers)
        except BaseException:
            router.process.kill()
            raise
        self.routers.append(router)
        return router

    def _start(
        self, name: str, role: str, revision: Revision, arguments: list[str], port: int
    ) -> Member:
        log = self.folder / f"{name}.log"
        process = Process(name, arguments, log, checkout=revision.folder)
        process.start()
        return Member(name, role, revision, process, port)

    @property
    def _file(self) -> Path:
        return self.folder / "workers.txt"

    def _list(self) -> None:
        fresh = self._file.with_suffix(".new")
        fresh.write_text("".join(f"{worker.address}\n" for worker in self.workers))
        fresh.replace(self._file)

    # -- ending and replacing --

    def end_worker(self, worker: Member, *, unlist: bool = True) -> int:
        """SIGTERM while a router has legs there; it drains, and its address goes after that.

        Args:
            worker: which one.
            unlist: else its address stays, for another one.

        Returns:
            How many legs there were.
        """
        legs = until(lambda: self.legs(worker), lambda: f"legs at {worker.name}\n{self.logs()}")
        worker.process.signal(signal.SIGTERM)
        code = worker.process.wait(deadline_s=DRAIN_S)
        self.workers.remove(worker)
        assert code == 0, f"{worker.name} ended with {code}\n{worker.process.tail()}"
        assert "drained" in worker.process.output(), worker.process.tail()
        if unlist:
            self._list()
        return legs

    def replace_worker(self, worker: Member, revision: Revision, *, in_place: bool) -> int:
        """Another revision's worker in place of one; see `end_worker`.

        Args:
            worker: the one that ends.
            revision: of the other one.
            in_place: it starts at the same address afterwards; else elsewhere before.
        """
        successor = (worker.role, revision)
        if in_place:
            legs = self.end_worker(worker, unlist=False)
            self.add_workers(successor, ports=[worker.port])
        else:
            self.add_workers(successor)
        for router in self.routers:
            self.wait_known(router, self.workers)
        return legs if in_place else self.end_worker(worker)

    def end_router(self, router: Member) -> None:
        """SIGTERM; it ends when its requests have ended."""
        router.process.signal(signal.SIGTERM)
        code = router.process.wait(deadline_s=DRAIN_S)
        self.routers.remove(router)
        self.ended_routers.append(router)
        assert code == 0, f"{router.name} ended with {code}\n{router.process.tail()}"

    def shut_down(self) -> None:
        """Nothing may be held; then everything ends in order."""
        try:
            until(lambda: not self.held(), lambda: f"nothing held: {self.held()}\n{self.logs()}")
            for members in (self.routers, self.workers):
                for member in members:
                    member.process.signal(signal.SIGTERM)
                for member in members:
                    assert member.process.wait() == 0, member.process.tail()
        finally:
            self.destroy()

    def destroy(self) -> None:
        """Kills what is left."""
        for member in (*self.routers, *self.workers):
            member.process.kill()

    # -- asking --

    def port(self) -> int:
        """Of the routers that say they are ready, one after the other."""
        routers, start = list(self.routers), next(self._turns)
        for at in range(len(routers)):
            router = routers[(start + at) % len(routers)]
            with contextlib.suppress(httpx.ConnectError):  # it has just ended
                if httpx.get(f"http://{router.address}/ready").status_code == 200:
                    return router.port
        raise AssertionError(f"no router is ready\n{self.logs()}")

    def known(self, router: Member) -> list[dict[str, Any]]:
        """What a router's admin API says of its workers."""
        answer = httpx.get(f"http://127.0.0.1:{router.admin_port}/workers").json()
        return list(answer["workers"])

    def legs(self, worker: Member) -> int:
        """Parts of requests that the routers have on a worker."""
        return sum(
            each["legs"]
            for router in self.routers
            for each in self.known(router)
            if each["address"] == worker.address
        )

    def wait_known(self, router: Member, workers: Sequence[Member]) -> None:
        """Waits until a router has exactly these workers, all ready."""

        def probe() -> bool:
            states = {each["address"]: each["state"] for each in self.known(router)}
            return states == {worker.address: "ready" for worker in workers}

        until(probe, lambda: f"{self.known(router)}\n{self.logs()}", deadline_s=START_DEADLINE_S)

    def metrics(self, router: Member) -> Metrics:
        return Metrics(httpx.get(f"http://{router.address}/metrics").text)

    def held(self) -> list[str]:
        """What keeps the workers from being idle, by their reports to the newest router."""
        metrics = self.metrics(self.routers[-1])
        gauges = ("waiting", "running", "leased_blocks", "quarantined_blocks")
        found = [each for gauge in gauges for each in metrics.find(f"tasuki_worker_{gauge}")]
        return [f"{each.name} {each.labels} {each.value:g}" for each in found if each.value]

    def replacements(self) -> list[int]:
        """Of each request that has ended at any router: how often it was placed again."""
        routers = (*self.routers, *self.ended_routers)
        text = "\n".join(router.process.output() for router in routers)
        return [int(count) for count in re.findall(r"request ended .*\breplacements=(\d+)", text)]

    def logs(self) -> str:
        """The last lines of everything, for a failure's message."""
        members = (*self.workers, *self.routers, *self.ended_routers)
        return "\n".join(f"--- {each.name}\n{each.process.tail()}" for each in members)
