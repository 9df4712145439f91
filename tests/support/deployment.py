"""A whole system on this machine: real workers, a real router, free ports.

Unlike `tasuki serve` nothing here restarts what dies: a test that kills a
worker decides itself whether and when it comes back.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.client import Client
from support.direct import fresh_load
from support.metrics import Metrics
from support.processes import Process
from support.relay import Relay
from support.waiting import free_port, until
from tasuki.v1.worker_pb2 import Load

MODEL_NAME = "test-model"
ROLE_PREFERENCE = 1000.0
"""Roles bind while a worker has them: tiny models' requests are split too."""
START_DEADLINE_S = 120.0
# A lease of 10 s may have to run out first.
IDLE_DEADLINE_S = 60.0
# Workers report at least once a second.
REPORT_PERIOD_S = 1.2


@dataclass(frozen=True)
class Options:
    """What a deployment is made of.

    Attributes:
        model: folder.
        prefill, decode, mixed: number of workers of each role.
        worker: further arguments of every worker, e.g. `("--kv-memory", "1000000")`.
        by_role: further arguments of the workers of a role.
        router: further arguments of the router.
        dtype: of weights and cache.
        modules: by worker, what runs in place of `tasuki`: see `Process`.
        relayed: the router reaches the workers through `Deployment.relays`.
    """

    model: Path
    prefill: int = 0
    decode: int = 0
    mixed: int = 0
    worker: Sequence[str] = ()
    by_role: Mapping[str, Sequence[str]] = field(default_factory=dict)
    router: Sequence[str] = ()
    dtype: str = "float32"
    modules: Mapping[str, Sequence[str]] = field(default_factory=dict)
    relayed: bool = False

    def roles(self) -> list[str]:
        return ["prefill"] * self.prefill + ["decode"] * self.decode + ["mixed"] * self.mixed


def _is_idle(load: Load) -> bool:
    """Whether a worker has nothing to do, and nobody holds a block of its."""
    busy = load.waiting_requests + load.running_requests
    kept = load.leased_blocks + load.quarantined_blocks
    return not busy and not kept and load.free_blocks == load.total_blocks


@dataclass
class WorkerHandle:
    """One worker: `name` is e.g. `decode-0`."""

    name: str
    role: str
    port: int
    process: Process


@dataclass
class Deployment:
    """Starts on construction through `launch`; `stop` ends it.

    Attributes:
        url: of the router.
        model: name that requests use.
        model_path: its folder.
        workers: by name.
        relays: by worker, if the router reaches it through one.
    """

    options: Options
    directory: Path
    workers: dict[str, WorkerHandle] = field(default_factory=dict)
    relays: dict[str, Relay] = field(default_factory=dict)
    router: Process | None = None
    url: str = ""
    model: str = MODEL_NAME
    client: Client | None = None

    @classmethod
    def launch(cls, options: Options, directory: Path) -> Deployment:
        """Starts all workers at once, then the router, and waits until all are known."""
        deployment = cls(options, directory)
        try:
            deployment._start()
        except BaseException:
            deployment.destroy()
            raise
        return deployment

    def _start(self) -> None:
        counts: dict[str, int] = {}
        for role in self.options.roles():
            name = f"{role}-{counts.setdefault(role, 0)}"
            counts[role] += 1
            port = free_port()
            arguments = self._worker_arguments(name, role, port)
            module = self.options.modules.get(name, ("tasuki",))
            process = Process(name, arguments, self._log(name), module)
            self.workers[name] = WorkerHandle(name, role, port, process)
            process.start()
            if self.options.relayed:
                self.relays[name] = Relay(port)
        self._start_router()
        for worker in self.workers.values():
            worker.process.wait_for_line("ready ", deadline_s=START_DEADLINE_S)
        self.wait_connected()

    def _start_router(self) -> None:
        router = ["router", "--host", "127.0.0.1", "--port", "0", "--readiness-grace-s", "0"]
        router += ["--model", str(self.options.model), "--served-model-name", MODEL_NAME]
        router += ["--role-preference", str(ROLE_PREFERENCE)]
        for worker in self.workers.values():
            front = self.relays.get(worker.name, worker)
            router += ["--worker", f"127.0.0.1:{front.port}"]
        self.router = Process("router", [*router, *self.options.router], self._log("router"))
        self.router.start()
        self.url = self.router.wait_for_line("listening on ", deadline_s=START_DEADLINE_S)
        self.client = Client(self.url, self.model)

    def _worker_arguments(self, name: str, role: str, port: int) -> list[str]:
        return [
            "worker",
            *("--model", str(self.options.model)),
            *("--name", name),
            *("--role", role),
            *("--host", "127.0.0.1"),
            *("--port", str(port)),
            *("--dtype", self.options.dtype),
            *self.options.worker,
            *self.options.by_role.get(role, ()),
        ]

    def _log(self, name: str) -> Path:
        return self.directory / f"{name}.log"

    @property
    def model_path(self) -> Path:
        return self.options.model

    # -- asking --

    @property
    def http(self) -> Client:
        assert self.client is not None
        return self.client

    def metrics(self) -> Metrics:
        response = self.http.http.get("/metrics")
        assert response.status_code == 200, response.text
        return Metrics(response.text)

    def logs(self) -> str:
        """The last lines of every process, for a failure's message."""
        processes = [worker.process for worker in self.workers.values()]
        processes += [self.router] if self.router else []
        return "\n".join(f"--- {p.name}\n{p.tail()}" for p in processes)

    def total(self, name: str, role: str | None = None) -> float:
        """A worker counter or gauge of `/metrics`, summed over the workers of a role."""
        labels = {"role": role} if role else {}
        return self.metrics().sum(f"tasuki_worker_{name}", **labels)

    def worker_holds(self, name: str) -> dict[str, float]:
        """What a worker has in hand, by its last report: requests, and blocks that it leased."""
        number = str(list(self.workers).index(name))
        gauges = ("waiting", "running", "leased_blocks")
        metrics = self.metrics()
        return {each: metrics.sum(f"tasuki_worker_{each}", worker=number) for each in gauges}

    def retries(self) -> float:
        """Attempts that the router abandoned or retargeted, for any reason."""
        return sum(sample.value for sample in self.metrics().find("tasuki_retries_total"))

    def gather(self, calls: Sequence[Any]) -> list[Any]:
        """Runs callables at once, each on its own thread; results in order.

        The first failure is raised, with the logs' ends in a note.
        """
        with ThreadPoolExecutor(len(calls)) as pool:
            futures: list[Future[Any]] = [pool.submit(call) for call in calls]
        try:
            return [future.result() for future in futures]
        except Exception as error:
            error.add_note(self.logs())
            raise

    # -- waiting --

    def alive_workers(self) -> list[WorkerHandle]:
        return [w for w in self.workers.values() if w.process.exit_code() is None]

    def wait_connected(self, *, deadline_s: float = 60.0) -> None:
        """Waits until the router is ready and knows every worker that runs."""
        wanted = len(self.alive_workers())

        def probe() -> bool:
            if self.http.http.get("/ready").status_code != 200:
                return False
            return self.connected_workers() == wanted

        until(probe, lambda: f"{wanted} workers connected\n{self.logs()}", deadline_s=deadline_s)

    def connected_workers(self) -> int:
        """Workers that the router calls up and has had a report from."""
        metrics = self.metrics()
        up = {s.labels["worker"] for s in metrics.find("tasuki_worker_up") if s.value == 1}
        return len(up & metrics.values("worker", "tasuki_worker_total_blocks"))

    def wait_idle(self, *, deadline_s: float = IDLE_DEADLINE_S) -> None:
        """The idle integrity check: nothing runs, nobody holds a referenced block.

        Workers report at least once a second, so the check must hold for longer
        than that: every worker has then said so anew.

        Raises:
            TimeoutError: blocks or requests are left; the message says which.
        """
        since_s = time.monotonic()

        def idle_for_long() -> bool:
            nonlocal since_s
            if self.held():
                since_s = time.monotonic()
            return time.monotonic() - since_s > REPORT_PERIOD_S

        until(
            idle_for_long,
            lambda: f"an idle system; still held: {self.held()}\n{self.logs()}",
            deadline_s=deadline_s,
            interval_s=0.1,
        )

    def check_idle(self) -> None:
        """The idle integrity check where nothing is read off `/metrics` after it.

        Workers are asked themselves, so that nobody has to wait for their reports.

        Raises:
            TimeoutError: as `wait_idle`.
        """
        until(
            lambda: not self.held() and not self.metrics().sum("tasuki_requests_in_flight"),
            lambda: f"an idle system; still held: {self.held()}\n{self.logs()}",
            deadline_s=IDLE_DEADLINE_S,
        )
        loads = [fresh_load(f"127.0.0.1:{worker.port}") for worker in self.alive_workers()]
        if not all(load is not None and _is_idle(load) for load in loads):
            self.wait_idle()

    def wait_quiet(self) -> None:
        """Waits until the latest reports say idle: enough between two requests."""
        until(lambda: not self.held(), lambda: f"quiet; still held: {self.held()}")

    def held(self) -> list[str]:
        """What keeps the system from being idle, one line each."""
        metrics = self.metrics()
        held = []
        for total in metrics.find("tasuki_worker_total_blocks"):
            name = total.labels["worker"]
            used = total.value - metrics.sum("tasuki_worker_free_blocks", worker=name)
            gauges = {"referenced_blocks": used}
            for gauge in ("leased_blocks", "quarantined_blocks", "waiting", "running"):
                gauges[gauge] = metrics.sum(f"tasuki_worker_{gauge}", worker=name)
            held += [f"{name}: {key} = {value:g}" for key, value in gauges.items() if value]
        return held

    # -- hurting --

    def names_of(self, role: str) -> list[str]:
        """Its workers of a role."""
        return [worker.name for worker in self.workers.values() if worker.role == role]

    def kill(self, name: str) -> None:
        """SIGKILL; returns when the process is gone."""
        self.workers[name].process.kill()

    def stop_process(self, name: str) -> None:
        """SIGSTOP."""
        self.workers[name].process.signal(signal.SIGSTOP)

    def stop_at_work(self, name: str, *of: str) -> dict[str, float]:
        """SIGSTOP at a moment at which the worker has something in hand.

        A worker reports with every step, so the last report before it stopped is true.

        Args:
            name: of the worker.
            of: what it must have in hand: keys of `worker_holds`, one of them is enough.

        Returns:
            What it has in hand.

        Raises:
            TimeoutError: it never had any.
        """

        def probe() -> dict[str, float]:
            self.stop_process(name)
            held = self.worker_holds(name)
            while held != (again := self.worker_holds(name)):  # until its last report is read
                held = again
            if any(held[each] for each in of):
                return held
            self.continue_process(name)
            return {}

        return until(probe, lambda: f"{name} at work: {self.worker_holds(name)}\n{self.logs()}")

    def continue_process(self, name: str) -> None:
        """SIGCONT."""
        self.workers[name].process.signal(signal.SIGCONT)

    def restart(self, name: str, *, wait: bool = True) -> None:
        """Starts a killed worker again, on the same port."""
        self.workers[name].process.start()
        if wait:
            self.workers[name].process.wait_for_line("ready ", deadline_s=START_DEADLINE_S)

    def restart_router(self) -> None:
        """SIGKILL to the router and another one in its place, at another address."""
        assert self.router is not None
        self.router.kill()
        self._start_router()
        self.wait_connected()

    def restore(self) -> None:
        """Brings back every worker that is gone and waits until all are connected."""
        gone = [w.name for w in self.workers.values() if w.process.exit_code() is not None]
        for name in gone:
            self.restart(name, wait=False)
        for name in gone:
            self.workers[name].process.wait_for_line("ready ", deadline_s=START_DEADLINE_S)
        self.wait_connected()

    # -- ending --

    def shut_down(self) -> None:
        """Idle check, then an orderly end of every process; each must exit with 0.

        Raises:
            TimeoutError, AssertionError: something was held, or a process had to be killed.
        """
        try:
            if self.alive_workers():
                self.check_idle()
            assert self.router is not None
            for group in ([self.router], [w.process for w in self.alive_workers()]):
                for process in group:
                    process.signal(signal.SIGTERM)
                for process in group:
                    code = process.wait()
                    assert code == 0, f"{process.name} ended with {code}:\n{process.tail()}"
        finally:
            self.destroy()

    def destroy(self) -> None:
        """Kills what is left."""
        if self.client is not None:
            self.client.close()
        for worker in self.workers.values():
            worker.process.kill()
        if self.router is not None:
            self.router.kill()
        for relay in self.relays.values():
            relay.close()
