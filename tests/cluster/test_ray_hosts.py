"""A worker divided among hosts of a Ray cluster: `tasuki serve --on ray --hosts-prefill 2`."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from support.client import Client
from support.deployment import ROLE_PREFERENCE
from support.metrics import Metrics
from support.models import VOCAB_SIZE
from support.on_ray import SETTINGS, await_end, hosts_of_workers, scale
from support.processes import Process
from support.ray_hosts import RayHost, RayHosts
from support.serving import wait_for_url
from support.waiting import until

pytestmark = [pytest.mark.system, pytest.mark.cluster, pytest.mark.timeout(1200)]

NO_ROOM_S = 5.0
BOTH = {("prefill-0", 0), ("prefill-0", 1)}


class Served:
    """A deployment, and the answers that are expected of it."""

    def __init__(self, hosts: RayHosts, model: Path) -> None:
        self.hosts, self.cluster = hosts, hosts.cluster
        self._settings = ("--model", str(model), *SETTINGS)
        draw = random.Random(7)
        self._prompts = [[draw.randrange(3, VOCAB_SIZE) for _ in range(150)] for _ in range(9)]
        alone = self._begin("--mixed", "1", on_ray=False)
        self._expected = [self._complete(prompt) for prompt in self._prompts]
        self._end(alone)
        divided = ("--tp-prefill", "2", "--hosts-prefill", "2", "--prefill", "1", "--decode", "1")
        self.process = self._begin(*divided, "--role-preference", f"{ROLE_PREFERENCE:g}")
        self._fresh = iter(range(1, len(self._prompts)))

    def ask(self, number: int = 0) -> None:
        """A prompt, answered as by one worker on one host."""
        assert self._complete(self._prompts[number]) == self._expected[number], number

    def ask_with_handoff(self) -> None:
        """A new prompt, which no prefix cache has: its KV comes from the divided worker."""
        before = self._pulled()
        self.ask(next(self._fresh))
        until(lambda: self._pulled() > before, self.process.tail)

    def await_back(self, times: int) -> None:
        """Wait until the divided worker is there again, and the router is connected with it."""
        back = "prefill-0 is back"
        until(lambda: self.process.output().count(back) >= times, self.process.tail, deadline_s=240)
        until(lambda: self._sum("tasuki_worker_up") == 2, self.process.tail)

    def close(self) -> None:
        left = [*hosts_of_workers().values(), *self.process.descendants()]
        self._end(self.process)
        await_end(left)

    def _begin(self, *words: str, on_ray: bool = True) -> Process:
        process = self.cluster.serve(*self._settings, *words, on_ray=on_ray)
        self._client = Client(wait_for_url(process), "llama")
        return process

    def _end(self, process: Process) -> None:
        self._client.close()
        process.signal(signal.SIGINT)
        assert process.wait(deadline_s=60) == 0, process.tail()

    def _complete(self, prompt: list[int]) -> list[int]:
        return self.cluster.namespace.run(self._client.complete, prompt, max_tokens=12).tokens

    def _sum(self, name: str) -> float:
        answer = self.cluster.namespace.run(self._client.http.get, "/metrics")
        return Metrics(answer.text).sum(name)

    def _pulled(self) -> float:
        return self._sum("tasuki_worker_kv_pulled_blocks_total")


@pytest.fixture
def served(ray_hosts: Callable[..., RayHosts], tiny_model: Path) -> Iterator[Served]:
    """A prefill worker over two hosts with 3 CPUs each, a decode worker on one of them."""
    made = Served(ray_hosts(3, 3), tiny_model)
    yield made
    made.close()


def test_a_worker_over_two_hosts(served: Served) -> None:
    cluster, process = served.cluster, served.process
    for _ in range(4):
        served.ask_with_handoff()
    assert set(hosts_of_workers()) == {*BOTH, ("decode-0", 0)}
    nodes = {tuple(group) for group in cluster.look()["groups"] if len(group) == 2}
    assert [len(set(group)) for group in nodes] == [2]
    for host in served.hosts.hosts:
        assert f"is on node {host.address}" in process.output()

    # Whole workers come and go; there is no room for a third one.
    assert scale("prefill", "2").stdout == "2 prefill + 1 decode: 3 workers, 2 before\n"
    assert set(hosts_of_workers()) >= {("prefill-1", 0), ("prefill-1", 1)}
    begun_s = time.monotonic()
    refused = scale("prefill", "3")
    took_s = time.monotonic() - begun_s
    asked = "has no room for prefill-2 on 2 nodes (1 CPU each), beside 3 other workers; its nodes"
    assert asked in refused.stderr
    assert took_s < NO_ROOM_S
    print(f"no room for --prefill 3: said after {took_s:.1f} s")
    served.ask()
    assert scale("prefill", "1").stdout == "1 prefill + 1 decode: 2 workers, 3 before\n"
    assert set(hosts_of_workers()) == {*BOTH, ("decode-0", 0)}
    until(lambda: cluster.look()["free_cpus"] == 3, "free CPUs", deadline_s=30, interval_s=0.5)

    # A host's process ends, then a host's actor: the worker ends whole, and is started whole.
    for times, number in ((1, 1), (2, 0)):
        before = hosts_of_workers()
        victim: psutil.Process | None = before["prefill-0", number]
        assert victim is not None
        if times == 2:
            victim = victim.parent()
            assert victim is not None
        victim.kill()
        await_end([before[key] for key in BOTH])
        served.ask()
        served.await_back(times)
        served.ask_with_handoff()
        assert hosts_of_workers()["decode-0", 0] == before["decode-0", 0]


def test_a_host_is_lost(served: Served) -> None:
    """Every request is answered meanwhile; with another host the worker is whole again."""
    served.ask_with_handoff()
    lost = host_without_decode(served)
    lost.lose()
    gone = "prefill-0 died"
    while gone not in served.process.output():
        served.ask()
    assert BOTH.isdisjoint(hosts_of_workers())
    waits = "it waits for a place: the Ray cluster has no room for prefill-0 on 2 nodes"
    deadline_s = time.monotonic() + 120.0
    while waits not in served.process.output():
        served.ask()
        assert time.monotonic() < deadline_s, served.process.tail()

    lost.heal()
    lost.start()
    served.await_back(1)
    served.ask_with_handoff()


def host_without_decode(served: Served) -> RayHost:
    """A host that has a part of the prefill worker alone."""
    look = served.cluster.look()
    (decode,) = [group[0] for group in look["groups"] if len(group) == 1]
    address = look["alive"][decode]
    (other,) = [host for host in served.hosts.hosts if host.address != address]
    return other
