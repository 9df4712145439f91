"""A worker of several ranks behind `tasuki serve`: the tokens of a worker of one, and its death."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.client import Client
from support.deployment import Deployment, Options
from support.metrics import Metrics
from support.models import VOCAB_SIZE
from support.processes import further_ranks
from support.waiting import until

from tasuki.bench.serving import Serving
from tasuki.launch.config import Topology

SAMPLED: dict[str, Any] = {"temperature": 1.0, "top_p": 0.9, "seed": 7}


def prompt(length: int) -> list[int]:
    draw = random.Random(length)
    return [draw.randrange(3, VOCAB_SIZE) for _ in range(length)]


@contextmanager
def serving(model: Path, degree: int, log: Path, workers: int = 1) -> Iterator[Client]:
    """Mixed workers of so many ranks, in float32 on the CPU."""
    said: dict[str, object] = {"model": model, "device": "cpu", "dtype": "float32"}
    said |= {"kv-memory": 64_000_000, "tp-mixed": degree}
    server = Serving(Topology(0, 0, workers), said, log)
    client = Client(server.url, server.model)
    try:
        yield client
    except BaseException as error:
        error.add_note(log.read_text(errors="replace")[-6000:])
        raise
    finally:
        client.close()
        server.stop()


@pytest.mark.parametrize("degree", [pytest.param(2, marks=pytest.mark.long), 4])
def test_a_divided_model_gives_the_tokens_of_a_whole_one(
    tiny: Deployment, tiny_model: Path, deploy: Callable[[Options], Deployment], degree: int
) -> None:
    """Many requests at once, in chunks and sampled ones too. With 4 ranks KV heads are double."""
    asked = [(prompt(length), {}) for length in (1, 16, 17, 300, 1000)]
    asked += [(prompt(length), SAMPLED) for length in (3, 40)]
    worker = ("--kv-memory", "64000000", "--tp", str(degree))
    system = deploy(Options(tiny_model, mixed=1, worker=worker))
    with ThreadPoolExecutor(len(asked)) as pool:
        got = list(
            pool.map(lambda one: system.http.complete(one[0], max_tokens=24, **one[1]), asked)
        )
    for (tokens, options), answer in zip(asked, got, strict=True):
        assert answer.tokens == tiny.http.complete(tokens, max_tokens=24, **options).tokens


def busy_worker(client: Client) -> str | None:
    """The name of the worker that runs something."""
    metrics = Metrics(client.http.get("/metrics").text)
    busy = [s.labels["worker"] for s in metrics.find("tasuki_worker_running") if s.value]
    return f"mixed-{busy[0]}" if busy else None


def test_a_rank_that_dies_takes_its_worker_along_and_the_request_goes_on(
    tiny: Deployment, tiny_model: Path, tmp_path: Path
) -> None:
    """On the other worker; and the launcher starts the one that died anew."""
    log, begun = tmp_path / "serve.log", threading.Event()
    with serving(tiny_model, 2, log, workers=2) as client, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(
            client.stream, prompt(17), max_tokens=800, on_token=lambda _: begun.set()
        )
        assert begun.wait(60)
        name = until(lambda: busy_worker(client), "a worker says that it is busy")
        (rank,) = further_ranks(name)
        rank.kill()
        answer = asked.result(120)
        until(lambda: further_ranks(name), f"{name} is back", deadline_s=60)
    assert answer.tokens == tiny.http.complete(prompt(17), max_tokens=800).tokens
    assert "rank 1: it ended by signal 9" in log.read_text()
