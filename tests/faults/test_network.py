"""The network between two workers is slow, loses packets, goes dead in mid-transfer, and heals.

Real workers and a router on three hosts, which are network namespaces (`support/networks.py`).
"""

from __future__ import annotations

import random
import re
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
PACKETS = LENGTH * TOKEN_BYTES // 1500  # of the KV of a prompt
LEASE_S = 2.0
START_S = 120.0
RATE_MEGABITS = 8.0
LEAST_SHARE = 0.8  # of the cable's rate; headers of packets take 0.05
ROLES_COUNT = 5.0
"""What half of a request costs on a worker of another role, in times of its own."""
MOST_TO_LEARN = 30  # requests over a slow link until the router knows it


class System:
    """One prefill and one decode worker on two hosts, and the router on a third one."""

    def __init__(
        self,
        hosts: Hosts,
        model: Path,
        folder: Path,
        transport: str,
        role_preference: float = ROLE_PREFERENCE,
    ) -> None:
        self.hosts = hosts
        self.processes = [
            HostProcess(
                role, hosts.by_name[role], _worker(model, role, transport), folder / f"{role}.log"
            )
            for role in ADDRESSES
        ]
        router = ["tasuki", "router", "--host", ROUTER, "--port", "8000", "--model", str(model)]
        router += ["--served-model-name", MODEL_NAME, "--role-preference", str(role_preference)]
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

    def wait_nothing_held(self) -> None:
        """No worker has a request, or a block that is not free."""

        def held() -> float:
            gauges = ("quarantined_blocks", "leased_blocks", "waiting", "running")
            used = self.total("worker_total_blocks") - self.total("worker_free_blocks")
            return used + sum(self.total(f"worker_{gauge}") for gauge in gauges)

        until(lambda: not held(), self.logs, deadline_s=60.0)

    def logs(self) -> str:
        return "\n".join(f"--- {process.name}\n{process.tail()}" for process in self.processes)

    def end(self) -> None:
        for process in self.processes:
            process.kill()


def _worker(model: Path, role: str, transport: str) -> list[str]:
    words = ["worker", "--model", str(model), "--name", role, "--role", role]
    words += ["--transport", transport]
    words += ["--host", ADDRESSES[role], "--port", str(PORT), "--dtype", "float32"]
    words += ["--device", "cpu", "--kv-memory", "50000000", "--lease-s", f"{LEASE_S:g}"]
    return [*words, "--pull-timeout-s", "3", "--kv-digest", "all"]


def prompt(seed: int) -> list[int]:
    draw = random.Random(f"network {seed}")
    return [draw.randrange(3, VOCAB_SIZE) for _ in range(LENGTH)]


@pytest.fixture(scope="module", params=["nixl", "tcp"])
def system(
    request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[System]:
    with three_hosts() as hosts:
        folder = tmp_path_factory.mktemp("network")
        system = System(hosts, tiny_model, folder, request.param)
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
    assert system.complete(5), "the pair is connected"
    system.hosts.rate(RATE_MEGABITS)
    before = [system.total(f"kv_pair_{name}_total") for name in ("bytes", "wire_seconds")]
    assert system.complete(1) == tiny.http.complete(prompt(1), max_tokens=8).tokens
    moved = -(-LENGTH // BLOCK) * BLOCK * TOKEN_BYTES
    until(lambda: system.total("kv_pair_bytes_total") == before[0] + moved, system.logs)
    seconds = system.total("kv_pair_wire_seconds_total") - before[1]
    share = moved / seconds / (RATE_MEGABITS * 1e6 / 8)
    print(f"{share:.2f} of the cable's rate")
    assert LEAST_SHARE < share < 1.2, "the cable is used, and is no faster"
    assert system.total("worker_kv_digest_mismatches_total") == 0


@pytest.mark.parametrize("share", [0.01, 0.05])
def test_lost_packets_cost_time_and_nothing_else(
    system: System, healed: Callable[[], None], tiny: Deployment, share: float
) -> None:
    """Between the workers, of KV and of the handoff's messages: some are placed again at most."""
    seeds = [int(10_000 * share) + number for number in range(12)]
    expected = {seed: tiny.http.complete(prompt(seed), max_tokens=8).tokens for seed in seeds}
    assert system.complete(4), "the pair is connected"
    pulls = system.total("kv_pair_pulls_total")
    system.hosts.lose(share)
    answers = {seed: system.begin(seed) for seed in seeds}
    assert {seed: answer.result(120.0) for seed, answer in answers.items()} == expected
    dropped, moved = system.hosts.dropped(), system.total("kv_pair_pulls_total") - pulls
    assert dropped > 2 * share * PACKETS, f"{dropped} packets were lost, {moved} prompts moved"
    print(f"{dropped} packets were lost, {moved:g} prompts moved")
    system.wait_nothing_held()  # while packets are still being lost
    assert moved > 0, "KV moved all the same"
    assert system.total("worker_kv_digest_mismatches_total") == 0
    assert all(process.exit_code() is None for process in system.processes), "none was restarted"


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
    system.wait_nothing_held()
    assert all(process.exit_code() is None for process in system.processes), "none was restarted"


def test_over_a_link_on_which_it_loses_nothing_is_split_and_the_log_says_why(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Roles count for less than a handoff takes over this link, and more than over a good one."""
    with three_hosts() as hosts:
        folder = tmp_path_factory.mktemp("slow")
        system = System(hosts, tiny_model, folder, "nixl", ROLES_COUNT)

        def reasons() -> list[str]:
            return re.findall(r'request ended .*\bwhy="([^"]+)"', system.processes[2].output())

        def asked(seed: int) -> str:
            """Why a further request was placed as it was."""
            known = len(reasons())
            assert system.complete(seed)
            until(lambda: len(reasons()) > known, system.logs)
            return reasons()[-1]

        try:
            system.start()
            hosts.rate(RATE_MEGABITS)
            assert asked(1).startswith("split "), "before anything is measured"
            found = ""
            for seed in range(1_000, 1_000 + MOST_TO_LEARN):
                found = asked(seed)
                if found.startswith("colocated "):
                    break
            why = r"colocated ([\d.]+) ms .*; split (?:at least )?([\d.]+) ms"
            told = re.fullmatch(why, found)
            assert told is not None, f"{reasons()}"
            assert float(told[1]) < float(told[2])
        finally:
            system.end()
