"""A router is told of the KV that sequences wait with at a worker, whoever sent them there."""

from __future__ import annotations

import queue
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.deployment import Deployment, Options
from support.direct import WorkerStream
from support.waiting import until

from tasuki.v1 import worker_pb2 as pb

WAITING = 6
LEASE_S = 120  # KV is waited for twice as long, and so beyond the end of the test
LONG, SHORT = 1_500, 20
ASKED = 60


def wait_at(worker: WorkerStream, peer: WorkerStream, tokens: int) -> None:
    """Decode legs whose KV does not come: the peer never gets the other legs."""
    for index in range(WAITING):
        worker.send(
            submit=pb.Submit(
                request_id=f"waits-{tokens}-{index}",
                number=index + 1,
                leg=pb.LEG_DECODE,
                peer=peer.peer(),
                prompt_tokens=[5 + index] * tokens,
                choices=[0],
                sampling=pb.SamplingParams(seed=1, top_p=1.0, repetition_penalty=1.0, max_tokens=8),
            )
        )


def test_a_router_places_by_the_kv_that_anothers_sequences_wait_with(
    tiny_model: Path, deploy: Callable[[Options], Deployment]
) -> None:
    worker = ("--kv-memory", "64000000", "--max-model-len", "2048", "--lease-s", str(LEASE_S))
    system = deploy(Options(tiny_model, mixed=2, worker=worker))
    heard: queue.Queue[Any] = queue.Queue()

    def streams() -> list[WorkerStream]:
        return [WorkerStream(f"127.0.0.1:{w.port}", heard) for w in system.workers.values()]

    senders, others = streams(), streams()
    try:
        wait_at(senders[0], senders[1], LONG)
        wait_at(senders[1], senders[0], SHORT)
        expected = [(WAITING, WAITING * LONG), (WAITING, WAITING * SHORT)]
        until(lambda: [waiting(stream) for stream in others] == expected, "the loads")
        metrics = system.metrics
        until(lambda: metrics().sum("tasuki_worker_waiting") == 2 * WAITING, "the router's loads")
        # As many wait at either. The router learns from each answer what short steps take here.
        for index in range(ASKED):
            # A report of the last answer's end may be late.
            until(lambda: metrics().sum("tasuki_worker_running") == 0, "a report of its end")
            answer = system.http.complete([100 + index, 7, 8], max_tokens=40)
            assert answer.timings is not None
            assert answer.timings["decode_worker"] == "1", index
        for sender in senders:
            sender.close()
        until(lambda: [waiting(stream) for stream in others] == [(0, 0)] * 2, "nothing waits")
    finally:
        for stream in (*senders, *others):
            stream.close()


def waiting(stream: WorkerStream) -> tuple[int, int]:
    """Sequences and tokens of KV, as a router's stream was told."""
    return stream.load.waiting_sequences, stream.load.waiting_kv_tokens
