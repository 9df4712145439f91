"""Fleets of Tasuki with a fault in each, and healthy ones: what `tasuki doctor` must say of them.

`tests/e2e/test_doctor.py` runs some of them, `benchmarks/doctor.py` all.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from support.deployment import Deployment, Options
from support.processes import REPOSITORY, environment
from support.waiting import free_port, until

WINDOW_S = 6.0
_DOCTOR_DEADLINE_S = 280.0
LEASE_S = 1.5
_WARM_S = 3.0  # of a load, before it is looked at

F = TypeVar("F")


class Reached(Protocol):
    """What has clients."""

    url: str


class Stoppable(Protocol):
    """What has processes that can stand still."""

    def stop_process(self, name: str) -> None: ...

    def continue_process(self, name: str) -> None: ...


@dataclass(frozen=True)
class Case(Generic[F]):
    """A state of a fleet.

    Attributes:
        finds: The check that must find it; empty: it is healthy, and nothing may be found.
        also: Checks that may find the same fault from another side.
        says: A word that the finding must have.
        seen: The workers that are looked at; empty: all.
    """

    name: str
    act: Callable[[F], AbstractContextManager[None]]
    finds: str = ""
    also: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    says: str = ""
    seen: tuple[str, ...] = ()


Act = Callable[[Deployment], AbstractContextManager[None]]


@dataclass(frozen=True)
class FleetCases:
    """A fleet, and the states that it is brought into one after the other.

    Attributes:
        environment: Of its workers, beyond the usual.
    """

    name: str
    options: Callable[[Path, Path], Options]
    cases: Sequence[Case[Deployment]]
    environment: Mapping[str, str] = field(default_factory=dict)

    @contextlib.contextmanager
    def running(self, model: Path, folder: Path) -> Iterator[Deployment]:
        """The fleet, from its start to its end."""
        before = dict(os.environ)
        os.environ.update(self.environment)
        deployment = Deployment.launch(self.options(model, folder), folder)
        try:
            yield deployment
        finally:
            deployment.destroy()
            os.environ.clear()
            os.environ.update(before)


@dataclass
class Load:
    """Clients that ask one after the other until the end.

    Attributes:
        clients: At once.
        prompt: Tokens of a prompt; drawn anew for each request.
        answer: Tokens of an answer.
        distinct: Prompts that there are; 0: each is new.
        pause_s: Of a client between two requests.
    """

    clients: int = 2
    prompt: int = 100
    answer: int = 8
    distinct: int = 0
    pause_s: float = 0.02

    @contextlib.contextmanager
    def on(self, fleet: Reached) -> Iterator[None]:
        """Runs it, warm from the beginning."""
        end = threading.Event()
        threads = [
            threading.Thread(target=self._ask, args=(fleet.url, number, end), daemon=True)
            for number in range(self.clients)
        ]
        for thread in threads:
            thread.start()
        time.sleep(_WARM_S)
        try:
            yield
        finally:
            end.set()
            for thread in threads:
                thread.join(60)

    def _ask(self, url: str, number: int, end: threading.Event) -> None:
        draw = random.Random(f"{number} {time.time_ns()}")
        while not end.is_set():
            seed = draw.randrange(self.distinct) if self.distinct else draw.random()
            tokens = random.Random(f"load {seed}")
            body = {
                "model": "test-model",
                "prompt": [tokens.randrange(3, 500) for _ in range(self.prompt)],
                "max_tokens": self.answer,
                "temperature": 0,
                "ignore_eos": True,
            }
            request = urllib.request.Request(
                f"{url}/v1/completions",
                json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )
            with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=60) as said:
                said.read()
            end.wait(self.pause_s)


@contextlib.contextmanager
def idle(deployment: Deployment) -> Iterator[None]:
    """Nobody asks."""
    deployment.wait_idle()
    yield


@contextlib.contextmanager
def pulses(fleet: Stoppable, name: str, stop_s: float, run_s: float) -> Iterator[None]:
    """A worker stands still and runs in turn: SIGSTOP, SIGCONT."""
    end = threading.Event()

    def pulse() -> None:
        while not end.is_set():
            fleet.stop_process(name)
            time.sleep(stop_s)
            fleet.continue_process(name)
            time.sleep(run_s)

    thread = threading.Thread(target=pulse, daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join(10 + stop_s)
        fleet.continue_process(name)


def slowed(name: str) -> Callable[[Stoppable], AbstractContextManager[None]]:
    """One worker is slow: it gets a fifth of the time, in slices that no probe fits into."""
    return lambda fleet: pulses(fleet, name, 0.04, 0.01)


def expired(reader: str, load: Load) -> Act:
    """A decode worker stands still again and again while KV waits for it, longer than leases."""

    @contextlib.contextmanager
    def act(deployment: Deployment) -> Iterator[None]:
        def count() -> float:
            return deployment.total("leases_expired_total", "prefill")

        end = threading.Event()

        def stop() -> None:
            while not end.is_set():
                deployment.stop_at_work(reader, "waiting")
                time.sleep(2 * LEASE_S)
                deployment.continue_process(reader)
                end.wait(LEASE_S)

        before = count()
        with load.on(deployment):
            thread = threading.Thread(target=stop, daemon=True)
            thread.start()
            try:
                until(lambda: count() > before, lambda: "a lease to expire", deadline_s=90)
                yield
            finally:
                end.set()
                thread.join(60)
                deployment.continue_process(reader)

    return act


@contextlib.contextmanager
def one_down(deployment: Deployment) -> Iterator[None]:
    """The last worker is killed."""
    name = list(deployment.workers)[-1]
    deployment.kill(name)
    until(
        lambda: deployment.connected_workers() < len(deployment.workers),
        lambda: "the router to miss it",
        deadline_s=60,
    )
    yield


@contextlib.contextmanager
def both_roles_gone(deployment: Deployment) -> Iterator[None]:
    """Clients ask while there is no decode worker: they get errors."""
    deployment.kill("decode-0")
    with Load(clients=4).on(deployment):
        metrics = deployment.metrics()
        until(
            lambda: any(s.value for s in deployment.metrics().find("tasuki_http_errors_total")),
            lambda: f"an error: {metrics}",
            deadline_s=90,
        )
        yield


def options(**said: Any) -> Callable[[Path, Path], Options]:
    """Tiny workers; the router has an admin port."""
    router = tuple(said.pop("router", ()))
    memory = ("--kv-memory", said.pop("kv_memory", "16000000"))
    worker = (*memory, *said.pop("worker", ()))

    def of(model: Path, _: Path) -> Options:
        admin = ("--admin-port", str(free_port()))
        return Options(model, router=(*admin, *router), worker=worker, **said)

    return of


def look(deployment: Deployment, *arguments: str) -> dict[str, Any]:
    """`tasuki doctor` at a fleet, as JSON with its exit status."""
    router = deployment.options.router
    admin = f"127.0.0.1:{router[list(router).index('--admin-port') + 1]}"
    command = ["doctor", deployment.url, "--admin", admin, "--json"]
    command += ["--window-s", str(WINDOW_S), *arguments]
    return run_doctor(command)


def run_doctor(arguments: Sequence[str]) -> dict[str, Any]:
    """`tasuki ARGUMENTS`, its JSON and exit status."""
    done = subprocess.run(
        [sys.executable, "-m", "tasuki", *arguments],
        cwd=REPOSITORY,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=_DOCTOR_DEADLINE_S,
        check=False,
    )
    assert done.stdout.startswith("{"), done.stdout + done.stderr
    return {**json.loads(done.stdout), "exit_status": done.returncode}


# Prompts that never repeat, then few that do; longer prompts, longer answers.
STEADY = Load()
SHARED = Load(clients=3, prompt=300, answer=4, distinct=12)
LONG_PROMPTS = Load(clients=1, prompt=800, answer=8, pause_s=0.3)
LONG_ANSWERS = Load(clients=2, prompt=60, answer=120)
BURSTS = Load(clients=8, prompt=60, answer=12, pause_s=0.4)

ALL: Sequence[FleetCases] = (
    FleetCases(
        "2 prefill, 2 decode",
        options(prefill=2, decode=2, worker=("--lease-s", f"{LEASE_S:g}")),
        (
            Case("2+2, idle", idle),
            Case("2+2, steady", STEADY.on),
            Case("2+2, bursts", BURSTS.on),
            Case("2+2, long answers", LONG_ANSWERS.on),
            Case("one decode worker slow", slowed("decode-1"), "slow worker"),
            Case(
                "KV expired: decode stood still",
                expired("decode-0", Load(6, 800, 8)),
                "lost KV",
                ("slow worker", "workers", "errors"),
                ("--no-probes",),
            ),
            Case("one worker gone", one_down, "workers", ("errors", "lost KV")),
        ),
    ),
    FleetCases(
        "2 mixed",
        options(mixed=2),
        (
            Case("2 mixed, idle", idle),
            Case("2 mixed, steady", STEADY.on),
            Case("2 mixed, prompts that repeat", SHARED.on),
            Case("2 mixed, long prompts", LONG_PROMPTS.on),
            Case("one mixed worker slow", slowed("mixed-1"), "slow worker"),
        ),
    ),
    FleetCases(
        "2 mixed, round robin",
        options(mixed=2, router=("--policy", "round-robin")),
        (
            Case("round robin, prompts never repeat", STEADY.on),
            Case("round robin, prompts that repeat", Load(3, 300, 4, 100).on, "prefix cache"),
        ),
    ),
    FleetCases(
        "4 mixed",
        options(mixed=4, kv_memory="8000000"),
        (Case("4 mixed, steady", STEADY.on), Case("4 mixed, bursts", BURSTS.on)),
    ),
    FleetCases(
        "1 prefill, 1 decode, strict",
        options(prefill=1, decode=1, router=("--strict-roles",)),
        (
            Case("1+1 strict, steady", Load(1, 100, 16, pause_s=0.1).on),
            Case("1+1 strict, long answers", LONG_ANSWERS.on),
            Case(
                "1+1 strict, prompts only",
                Load(12, 1500, 2, pause_s=0.0).on,
                "ratio",
                (),
                ("--no-probes",),
            ),
            Case("no decode worker left", both_roles_gone, "errors", ("workers", "lost KV")),
        ),
    ),
    FleetCases(
        "lengths differ",
        options(prefill=1, decode=1, by_role={"decode": ("--max-model-len", "1024")}),
        (Case("max model len differs", idle, "configuration"),),
    ),
    FleetCases(
        "TCP on one host",
        options(prefill=1, decode=1, router=("--strict-roles",)),
        (Case("KV by TCP on one host", STEADY.on, "KV transport"),),
        {"UCX_TLS": "tcp"},
    ),
    FleetCases(
        "little memory",
        options(
            mixed=1,
            kv_memory="1700000",
            router=("--no-admission",),
            worker=("--max-model-len", "1024"),
        ),
        (
            Case(
                "KV memory full",
                Load(12, 200, 400).on,
                "KV memory",
                ("preemptions",),
                ("--no-probes",),
            ),
        ),
    ),
)
