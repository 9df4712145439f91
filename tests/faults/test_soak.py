"""Hundreds of requests with aborts and hang-ups at random moments leave nothing behind."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.client import Answer, Client
from support.deployment import Deployment, Options
from support.models import VOCAB_SIZE
from support.processes import Process

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]

REQUESTS = 500
# Until every batch shape has been seen and the allocator has what it wants.
WARM_UP_REQUESTS = 2000
MEASURED_REQUESTS = 1000
# Of so many requests each: a leak grows in every window, the steps of an allocator do not.
WINDOWS = 3
CONCURRENCY = 16
# Growth of resident memory per 1,000 requests, as a share of it.
MEMORY_SLOPE_LIMIT = 0.01


class HangUpError(Exception):
    """The client closes its connection."""


def one_request(client: Client, seed: int) -> str:
    """A request drawn from `seed`; returns what became of it."""
    draw = random.Random(seed)
    prompt = [draw.randrange(3, VOCAB_SIZE) for _ in range(draw.choice((3, 30, 120, 500)))]
    options: dict[str, Any] = {"max_tokens": draw.randint(1, 60)}
    match draw.randrange(5):
        case 0:
            answer = client.complete(prompt, **options)
            assert len(answer.tokens) == options["max_tokens"]
            return "complete"
        case 1:
            answer = client.stream(prompt, **options)
            assert len(answer.tokens) == options["max_tokens"]
            return "stream"
        case 2:  # hangs up in mid-stream
            after = draw.randint(1, options["max_tokens"])

            def hang_up(answer: Answer) -> None:
                if len(answer.tokens) >= after:
                    raise HangUpError

            with pytest.raises(HangUpError):
                client.stream(prompt, on_token=hang_up, **options)
            return "hang-up in the stream"
        case 3:  # hangs up at once, wherever the request is by then
            body = {"model": client.model, "prompt": prompt, "ignore_eos": True, **options}
            patience_s = draw.uniform(0.001, 0.15)
            try:
                client.http.post("/v1/completions", json=body, timeout=patience_s)
            except httpx.TimeoutException:
                return "hang-up before the answer"
            return "faster than its hang-up"
        case _:  # two choices, sampled; any EOS ends one early
            body = {"model": client.model, "prompt": prompt, "n": 2, "seed": seed, **options}
            document = client.post("/v1/completions", body)
            assert [choice["index"] for choice in document["choices"]] == [0, 1]
            return "two choices"


def run_requests(system: Deployment, seeds: range) -> list[str]:
    with ThreadPoolExecutor(CONCURRENCY) as pool:
        return list(pool.map(lambda seed: one_request(system.http, seed), seeds))


@pytest.fixture(scope="module")
def system(tiny_model: Path, deploy_for_module: Callable[[Options], Deployment]) -> Deployment:
    # 150 blocks: far fewer than sixteen requests would like.
    options = ("--kv-memory", str(150 * 12288), "--max-model-len", "640")
    options += ("--max-batched-tokens", "256")
    return deploy_for_module(Options(tiny_model, prefill=1, decode=1, worker=options))


def test_random_lengths_aborts_and_disconnects(system: Deployment) -> None:
    outcomes = run_requests(system, range(REQUESTS))
    print({outcome: outcomes.count(outcome) for outcome in sorted(set(outcomes))})
    assert len(outcomes) == REQUESTS
    assert outcomes.count("hang-up before the answer") > REQUESTS // 50
    system.wait_idle()


def growth(system: Deployment, processes: dict[str, Process], first: int) -> dict[str, float]:
    """The slope of each process's resident memory over the requests of one window."""
    step = 100
    done: list[int] = []
    resident: dict[str, list[float]] = {name: [] for name in processes}
    for start in range(0, MEASURED_REQUESTS, step):
        run_requests(system, range(first + start, first + start + step))
        done.append(start + step)
        for name, process in processes.items():
            resident[name].append(float(process.rss_bytes()))
    grown = {}
    for name, sizes in resident.items():
        slope = statistics.linear_regression(done, sizes).slope * 1000
        grown[name] = slope / statistics.mean(sizes)
        print(f"{name}: {statistics.mean(sizes) / 1e6:.1f} MB, {grown[name]:+.3%} per 1,000")
    return grown


def test_memory_does_not_grow(system: Deployment) -> None:
    """After warm-up every process has a window of requests in which it stays as it is."""
    processes = {w.name: w.process for w in system.workers.values()}
    assert system.router is not None
    processes["router"] = system.router
    run_requests(system, range(10_000, 10_000 + WARM_UP_REQUESTS))
    least = dict.fromkeys(processes, math.inf)
    for window in range(WINDOWS):
        grown = growth(system, processes, 20_000 + window * MEASURED_REQUESTS)
        least = {name: min(least[name], grown[name]) for name in processes}
        if max(least.values()) < MEMORY_SLOPE_LIMIT:
            break
    assert max(least.values()) < MEMORY_SLOPE_LIMIT, least
    system.wait_idle()
