"""Roles follow the load of two routers, and the death of the one that moves them.

Three workers, strict roles. Long prompts with short answers come, for which one prefill worker is
too few, and a role changes under load. Then short prompts with long answers come, and the router
that owns the roles is killed: the other one takes them over. Every answer is the right one
throughout: what runs on a worker goes on there when its role changes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.client import Client
from support.crowd import check
from support.deployment import START_DEADLINE_S, Deployment, Options
from support.metrics import Metrics
from support.processes import Process
from support.reference import Reference
from support.waiting import until
from support.workload import known_requests

pytestmark = pytest.mark.faults
FOLLOW = ("--strict-roles", "--roles", "follow")
CLIENTS = 12


def metrics(client: Client) -> Metrics:
    return Metrics(client.http.get("/metrics").text)


def owns(client: Client) -> bool:
    found = metrics(client).find("tasuki_roles_owner")
    return any(sample.value == 1 for sample in found)


def changes(client: Client) -> float:
    return sum(s.value for s in metrics(client).find("tasuki_role_changes_total"))


def second_router(system: Deployment) -> tuple[Process, Client]:
    words = ["router", "--host", "127.0.0.1", "--port", "0", "--readiness-grace-s", "0"]
    words += ["--model", str(system.model_path), "--served-model-name", system.model]
    for worker in system.workers.values():
        words += ["--worker", f"127.0.0.1:{worker.port}"]
    process = Process("router-2", [*words, *FOLLOW], system.directory / "router-2.log")
    process.start()
    client = Client(
        process.wait_for_line("listening on ", deadline_s=START_DEADLINE_S), system.model
    )
    until(lambda: client.http.get("/ready").status_code == 200, "the second router is ready")
    return process, client


class Load:
    """Asks again and again, by several threads, and checks every answer."""

    def __init__(self, clients: Sequence[Client], references: Sequence[Reference]) -> None:
        self._clients, self._references = clients, references
        self._done = threading.Event()
        self._pool = ThreadPoolExecutor(CLIENTS)
        self._asking = [self._pool.submit(self._ask, number) for number in range(CLIENTS)]

    def _ask(self, number: int) -> int:
        answers = 0
        client = self._clients[number % len(self._clients)]
        while not self._done.is_set():
            reference = self._references[(number + answers) % len(self._references)]
            length = len(reference.tokens)
            # No prompt is cached: it would cost nothing.
            salt = f"{number}-{answers}"
            answer = client.stream(reference.prompt_tokens, max_tokens=length, cache_salt=salt)
            check(answer, reference)
            answers += 1
        return answers

    def failed(self) -> bool:
        return any(each.done() for each in self._asking)

    def end(self) -> int:
        """Answers in all.

        Raises:
            Exception: An answer was wrong, or none.
        """
        self._done.set()
        self._pool.shutdown()
        return sum(each.result(0) for each in self._asking)


@pytest.mark.timeout(400)
def test_roles_follow_a_swing_and_a_dead_owner_is_succeeded(
    tiny_model: Path, deploy: Callable[[Options], Deployment]
) -> None:
    long = known_requests(tiny_model, 2, prompt_lengths=(640,), steps=2)
    short = known_requests(tiny_model, 2, prompt_lengths=(16,), steps=100)
    worker = ("--kv-memory", "50000000")
    system = deploy(Options(tiny_model, prefill=1, decode=2, worker=worker, router=FOLLOW))
    process, other = second_router(system)
    clients = [system.http, other]
    try:
        until(lambda: sum(map(owns, clients)) == 1, system.logs, deadline_s=30)
        owner = 0 if owns(clients[0]) else 1
        load = Load(clients, long)
        until(
            lambda: load.failed() or changes(clients[owner]) > 0,
            lambda: f"a change of roles\n{system.logs()}",
            deadline_s=90,
        )
        assert load.end() > 0
        assert [changes(client) > 0 for client in clients] == [owner == 0, owner == 1]
        routers = [system.router, process]
        assert routers[owner] is not None
        assert "changes a role" in routers[owner].output()

        survivor = clients[1 - owner]
        load = Load([survivor], short)
        routers[owner].kill()
        until(
            lambda: load.failed() or owns(survivor),
            lambda: f"another owner\n{system.logs()}\n{process.tail()}",
            deadline_s=60,
        )
        assert load.end() > 0
        assert metrics(survivor).sum("tasuki_roles_taken_total") == 1
        wanted = metrics(survivor).find("tasuki_workers_wanted")
        assert {sample.labels["role"] for sample in wanted} == {"prefill", "decode", "mixed"}
    finally:
        process.kill()
        other.close()
        if system.router is not None and system.router.exit_code() is not None:
            system._start_router()  # the idle check at the end asks it
            system.wait_connected()
