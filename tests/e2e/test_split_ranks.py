"""Workers of several ranks: the tokens of workers of one; their death under `tasuki serve`."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.client import Client
from support.deployment import ROLE_PREFERENCE, Deployment, Options
from support.metrics import Metrics
from support.models import VOCAB_SIZE
from support.processes import further_ranks
from support.waiting import until

from tasuki.bench.serving import Serving
from tasuki.launch.config import Topology

BLOCK = 16
# Of one KV head: layers, K and V, head size, tokens, bytes of float32.
HEAD_BYTES = 3 * 2 * 16 * BLOCK * 4
KV_HEADS = 2
LENGTHS = (1, 16, 17, 300, 1000)
CHECKED = ("--kv-memory", "64000000", "--kv-digest", "all")


def prompt(length: int) -> list[int]:
    draw = random.Random(length)
    return [draw.randrange(3, VOCAB_SIZE) for _ in range(length)]


@contextmanager
def serving(model: Path, topology: Topology, log: Path, **options: object) -> Iterator[Client]:
    """`tasuki serve` on the CPU in float32, a client for it; failures carry the log's end."""
    said: dict[str, object] = {"model": model, "device": "cpu", "dtype": "float32"}
    said["role-preference"] = ROLE_PREFERENCE
    server = Serving(topology, said | {"kv-memory": 64_000_000} | options, log)
    client = Client(server.url, server.model)
    try:
        yield client
    except BaseException as error:
        error.add_note(log.read_text(errors="replace")[-6000:])
        raise
    finally:
        client.close()
        server.stop()


@pytest.mark.parametrize(
    ("prefill", "decode"), [(2, 1), pytest.param(1, 2, marks=pytest.mark.long), (1, 4)]
)
def test_split_between_degrees_gives_the_tokens_of_workers_of_one(
    tiny: Deployment,
    tiny_model: Path,
    deploy: Callable[[Options], Deployment],
    prefill: int,
    decode: int,
) -> None:
    """With 4 ranks every KV head is on two of them, and read into both."""
    degrees = {"prefill": ("--tp", str(prefill)), "decode": ("--tp", str(decode))}
    system = deploy(Options(tiny_model, prefill=1, decode=1, worker=CHECKED, by_role=degrees))
    blocks = 0
    for length in LENGTHS:
        answer = system.http.complete(prompt(length), max_tokens=24)
        assert answer.tokens == tiny.http.complete(prompt(length), max_tokens=24).tokens
        blocks += -(-length // BLOCK)

    until(
        lambda: system.total("kv_pulled_blocks_total", "decode") == blocks,
        f"{blocks} blocks are pulled",
        deadline_s=20,
    )
    moved = blocks * max(KV_HEADS, decode) * HEAD_BYTES
    assert system.total("kv_pulled_bytes_total", "decode") == moved
    assert system.total("prompt_tokens_computed_total", "decode") == 0
    assert system.total("kv_pull_failures_total", "decode") == 0
    assert system.total("kv_digests_total", "decode") == blocks * max(KV_HEADS, decode)
    assert system.total("kv_digest_mismatches_total", "decode") == 0
    assert system.metrics().sum("tasuki_kv_pair_bytes_total", role="decode") == moved
    assert not system.metrics().find("tasuki_kv_pair_failures_total")


def test_degrees_and_block_sizes_may_differ_at_once(
    tiny: Deployment, tiny_model: Path, tmp_path: Path
) -> None:
    options = {"tp-prefill": 2, "decode-option": "block-size=24", "kv-digest": "all"}
    with serving(tiny_model, Topology(1, 1, 0), tmp_path / "serve.log", **options) as client:
        for length in LENGTHS:
            answer = client.complete(prompt(length), max_tokens=24)
            assert answer.tokens == tiny.http.complete(prompt(length), max_tokens=24).tokens
        blocks = sum(-(-length // 24) for length in LENGTHS)

        def totals() -> Metrics:
            return Metrics(client.http.get("/metrics").text)

        name = "tasuki_worker_kv_pulled_blocks_total"
        until(lambda: totals().sum(name, role="decode") == blocks, "pulled blocks", deadline_s=20)
        found = totals()
        assert found.sum("tasuki_worker_prompt_tokens_computed_total", role="decode") == 0
        digests = sum(-(-length // 8) for length in LENGTHS) * KV_HEADS
        assert found.sum("tasuki_worker_kv_digests_total", role="decode") == digests
        assert found.sum("tasuki_worker_kv_digest_mismatches_total", role="decode") == 0


@pytest.mark.faults
def test_a_rank_that_dies_in_a_crowd_costs_no_request(
    tiny: Deployment, tiny_model: Path, tmp_path: Path
) -> None:
    degrees = {"tp-prefill": 2, "tp-decode": 2}
    fresh = itertools.count(1001)
    with serving(tiny_model, Topology(1, 1, 0), tmp_path / "serve.log", **degrees) as client:

        def is_split() -> bool:
            answer = client.complete(prompt(next(fresh)), max_tokens=2)
            return (answer.timings or {}).get("transfer_bytes", 0) > 0

        for victim, first in (("prefill-0", 400), ("decode-0", 401)):
            lengths = range(first, 1000, 50)
            wanted = [tiny.http.complete(prompt(n), max_tokens=40).tokens for n in lengths]
            until(is_split, "both workers are there", deadline_s=120, interval_s=1.0)
            with ThreadPoolExecutor(len(wanted)) as pool:
                calls = [pool.submit(client.complete, prompt(n), max_tokens=40) for n in lengths]
                until(lambda: any(c.done() for c in calls), "an answer", deadline_s=60)  # noqa: B023
                (rank,) = further_ranks(victim)
                rank.kill()
                answers = [call.result(timeout=120).tokens for call in calls]
            assert answers == wanted
        until(is_split, "both workers are there again", deadline_s=120, interval_s=1.0)
