"""`tasuki serve --on ray` on one node: the short version of test_ray.py."""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from support.client import Client
from support.on_ray import SETTINGS, RayCluster, await_end, workers
from support.serving import wait_for_url
from support.waiting import until

pytestmark = pytest.mark.system


def test_an_actors_death_costs_no_answer(
    ray_cluster: Callable[..., RayCluster], tiny_model: Path
) -> None:
    cluster = ray_cluster(1)
    process = cluster.serve("--model", str(tiny_model), *SETTINGS, "--mixed", "1")
    client = Client(wait_for_url(process), "llama")

    def answer() -> list[int]:
        return cluster.namespace.run(client.complete, "gong bast", max_tokens=8).tokens

    before, worker = answer(), workers()["mixed-0"]
    actor = worker.parent()
    assert actor is not None
    assert actor.pid != process.pid
    assert cluster.look()["free_cpus"] == 0

    actor.kill()
    await_end([worker])  # it ends with its actor
    until(lambda: "mixed-0 is back" in process.output(), process.tail, deadline_s=120)
    ready = partial(cluster.namespace.run, client.http.get, "/ready")
    until(lambda: ready().status_code == 200, process.tail)  # the router is connected to it
    assert answer() == before

    again = workers()["mixed-0"]
    assert again.pid != worker.pid
    process.signal(signal.SIGINT)
    assert process.wait(deadline_s=60) == 0, process.tail()
    await_end([again])
    client.close()
