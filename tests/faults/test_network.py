"""The network between two workers is slow, goes dead in mid-transfer, and heals.

Real workers and a router on three hosts, which are network namespaces (`support/networks.py`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
from support.client import Client
from support.deployment import MODEL_NAME, ROLE_PREFERENCE, Deployment
from support.metrics import Metrics
from support.models import VOCAB_SIZE
from support.networks import ADDRESSES, ROUTER, HostProcess, Hosts, three_hosts
from support.waiting import until

pytestmark = pytest.mark.faults

PORT = 7100
LENGTH = 1_000
TOKEN_BYTES = 3 * 2 * 2 * 16 * 4  # layers, K and V, KV heads, head size, float32
BLOCK = 16
LEASE_S = 2.0
START_S = 120.0
RATE_MEGABITS = 8.0


class System:
    """One prefill and one decode worker on two hosts, and the router on a third one."""

    def __init__(self, hosts: Hosts, model: Path, folder: Path) -> None:
        self.hosts = hosts
        self.processes = [
            HostProcess(role, hosts.by_name[role], _worker(model, role), folder / f"{role}.log")
            for role in ADDRESSES
        ]
        router = ["tasuki", "router", "--host", ROUTER, "--port", "8000", "--model", str(model)]
        router += ["--served-model-name", MODEL_NAME, "--role-preference", str(ROLE_PREFERENCE)]
        router += ["--metrics-listen", f"{ROUTER}:8001"]
        for address in ADDRESSES.values():
            router += ["--worker", f"{address}:{PORT}"]
        log = folder / "router.log"
        self.processes.append(HostProcess("router", hosts.by_name["router"], router[1:], log))

    def start(self) -> None:
        for process in self.processes:
            process.start()
        for process in self.processes[:2]:
            process.wait_for_line("ready ", deadline_s=START_S)
        self.processes[2].wait_for_line("listening on ", deadline_s=START_S)
        self.client = self.hosts.at_router(lambda: Client(f"http://{ROUTER}:8000", MODEL_NAME))
        until(lambda: self.total("worker_up") == 2, self.logs, deadline_s=START_S)

    def begin(self, seed: int) -> Future[list[int]]:
        ask = self.client.complete
        return self.hosts.begin_at_router(lambda: ask(prompt(seed), max_tokens=8).tokens)

    def complete(self, seed: int) -> list[int]:
        return self.begin(seed).result(60.0)

    def total(self, name: str, **labels: str) -> float:
        """A metric, summed; 0 where nothing has happened yet."""
        url = f"http://{ROUTER}:8001/metrics"
        text = self.hosts.at_router(lambda: self.client.http.get(url).text)
        return sum(sample.value for sample in Metrics(text).find(f"tasuki_{name}", **labels))

    def logs(self) -> str:
        return "\n".join(f"--- {process.name}\n{process.tail()}" for process in self.processes)

    def end(self) -> None:
        for process in self.processes:
            process.kill()


def _worker(model: Path, role: str) -> list[str]:
    words = ["worker", "--model", str(model), "--name", role, "--role", role]
    words += ["--host", ADDRESSES[role], "--port", str(PORT), "--dtype", "float32"]
    words += ["--device", "cpu", "--kv-memory", "50000000", "--lease-s", f"{LEASE_S:g}"]
    return [*words, "--pull-timeout-s", "3", "--kv-digest", "all"]


def prompt(seed: int) -> list[int]:
    draw = random.Random(f"network {seed}")
    return [draw.randrange(3, VOCAB_SIZE) for _ in range(LENGTH)]


@pytest.fixture(scope="module")
def system(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with three_hosts() as hosts:
        system = System(hosts, tiny_model, tmp_path_factory.mktemp("network"))
        try:
            system.start()
            yield system
        except BaseException as error:
            error.add_note(system.logs())
            raise
        finally:
            system.end()


@pytest.fixture
def healed(system: System) -> Iterator[Callable[[], None]]:
    """What a test does to the cable is undone, whatever becomes of it."""
    yield system.hosts.heal
    system.hosts.heal()


def test_kv_over_a_slow_link_is_whole_and_its_rate_is_told(
    system: System, healed: Callable[[], None], tiny: Deployment
) -> None:
    system.hosts.rate(RATE_MEGABITS)
    before = [system.total(f"kv_pair_{name}_total") for name in ("bytes", "wire_seconds")]
    assert system.complete(1) == tiny.http.complete(prompt(1), max_tokens=8).tokens
    moved = -(-LENGTH // BLOCK) * BLOCK * TOKEN_BYTES
    until(lambda: system.total("kv_pair_bytes_total") == before[0] + moved, system.logs)
    seconds = system.total("kv_pair_wire_seconds_total") - before[1]
    assert moved / seconds < 1.2 * RATE_MEGABITS * 1e6 / 8, "no faster than the cable"
    assert system.total("worker_kv_digest_mismatches_total") == 0


def test_a_request_outlives_a_dead_link_and_the_pair_works_again_when_it_heals(
    system: System, healed: Callable[[], None], tiny: Deployment
) -> None:
    expected = tiny.http.complete(prompt(2), max_tokens=8).tokens
    assert system.complete(3), "the pair is connected"
    retries = system.total("retries_total")
    system.hosts.rate(RATE_MEGABITS / 4)  # 3 s of transfer
    answer = system.begin(2)
    until(lambda: system.total("worker_leased_blocks") > 0, system.logs)
    system.hosts.cut()
    assert answer.result(60.0) == expected
    assert system.hosts.dropped() > 0, "nothing was cut off"
    assert system.total("retries_total") > retries
    until(lambda: system.total("kv_pair_failures_total") > 0, system.logs)
    healed()
    pulls = system.total("kv_pair_pulls_total")

    def pulled() -> bool:
        assert system.complete(random.randrange(1 << 30))
        return system.total("kv_pair_pulls_total") > pulls

    until(pulled, system.logs, deadline_s=60.0, interval_s=0.5)
    gauges = ("worker_quarantined_blocks", "worker_leased_blocks")
    until(lambda: not any(system.total(name) for name in gauges), system.logs, deadline_s=60.0)
    assert all(process.exit_code() is None for process in system.processes), "none was restarted"
