"""Two mixed workers with tiny pools hand over to each other, both ways at once.

Each holds blocks that the other wants room for: the classic deadlock, were
there not two budgets. A minimal router places the legs, for the real one would
rather not split here.
"""

from __future__ import annotations

import itertools
import queue
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.deployment import Deployment, Options
from support.direct import WorkerStream
from support.reference import Reference
from support.workload import known_requests

from tasuki.v1 import worker_pb2 as pb

pytestmark = pytest.mark.faults

REQUESTS = 24
STEPS = 60
MAX_LEN = 400
# The least that a worker accepts: two requests of maximal length.
BLOCKS = 2 * MAX_LEN // 16
BLOCK_BYTES = 3 * 2 * 2 * 16 * 16 * 4
DEADLINE_S = 120.0


class CrossedTraffic:
    """Places every request on (a, b) or (b, a), and again whenever decode gives it back."""

    def __init__(self, workers: list[WorkerStream], heard: queue.Queue[Any]) -> None:
        self.workers = workers
        self.heard = heard
        self.references: dict[int, Reference] = {}
        self.tokens: dict[int, dict[int, int]] = {}
        self.attempt: dict[int, int] = {}
        self.legs: dict[str, int] = {}
        self.reasons: list[int] = []

    def place(self, number: int) -> None:
        """A new attempt: what was produced is resumed, not produced again."""
        self.attempt[number] = self.attempt.get(number, -1) + 1
        attempt = f"crossed-{number}.{self.attempt[number]}"
        prefill, decode = self.workers if number % 2 else reversed(self.workers)
        reference = self.references[number]
        produced = self.produced(number)
        self.legs[attempt] = 2
        for worker, leg, peer in (
            (prefill, pb.LEG_PREFILL, decode),
            (decode, pb.LEG_DECODE, prefill),
        ):
            worker.send(
                submit=pb.Submit(
                    request_id=attempt,
                    leg=leg,
                    peer=peer.peer(),
                    prompt_tokens=reference.prompt_tokens,
                    resumed_tokens=produced,
                    choices=[0],
                    sampling=pb.SamplingParams(
                        seed=1,
                        top_p=1.0,
                        repetition_penalty=1.0,
                        max_tokens=len(reference.tokens),
                    ),
                )
            )

    def produced(self, number: int) -> list[int]:
        """The tokens so far that have no gap before them."""
        tokens = self.tokens.setdefault(number, {})
        return [tokens[i] for i in itertools.takewhile(tokens.__contains__, itertools.count())]

    def run(self, references: list[Reference]) -> None:
        self.references = dict(enumerate(references))
        for number in self.references:
            self.place(number)
        end = time.monotonic() + DEADLINE_S
        while self.legs:
            try:
                said = self.heard.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                raise TimeoutError(f"legs left: {self.legs}; loads {self.loads()}") from None
            number = int(said.request_id.split("-")[1].split(".")[0])
            if isinstance(said, pb.Output):
                for offset, token in enumerate(said.tokens):
                    known = self.tokens.setdefault(number, {}).setdefault(
                        said.position + offset, token
                    )
                    assert known == token, f"{said.request_id}: two tokens at one position"
            else:
                self._ended(number, said)

    def _ended(self, number: int, end: pb.LegEnd) -> None:
        self.reasons.append(end.reason)
        assert end.reason not in (pb.LEG_END_FAILED, pb.LEG_END_REJECTED), end
        if end.reason == pb.LEG_END_REFUSED:  # the other leg has nobody to hand over to
            for worker in self.workers:
                worker.send(abort=pb.Abort(request_id=end.request_id))
        self.legs[end.request_id] -= 1
        if self.legs[end.request_id] == 0:
            del self.legs[end.request_id]
            if len(self.produced(number)) < len(self.references[number].tokens):
                self.place(number)

    def loads(self) -> list[pb.Load]:
        return [worker.load for worker in self.workers]


def test_crossed_traffic_with_tiny_pools_finishes(
    tiny_model: Path, deploy: Callable[[Options], Deployment]
) -> None:
    references = known_requests(
        tiny_model, REQUESTS, prompt_lengths=(330, 17, 200, 90), steps=STEPS, seed=5
    )
    options = ("--max-model-len", str(MAX_LEN), "--kv-memory", str(BLOCKS * BLOCK_BYTES))
    options += ("--max-batched-tokens", "128")
    system = deploy(Options(tiny_model, mixed=2, worker=options))
    heard: queue.Queue[Any] = queue.Queue()
    workers = [WorkerStream(f"127.0.0.1:{w.port}", heard) for w in system.workers.values()]
    try:
        traffic = CrossedTraffic(workers, heard)
        traffic.run(references)
    finally:
        for worker in workers:
            worker.close()
    for number, reference in traffic.references.items():
        assert traffic.produced(number) == reference.tokens, reference.name
    print("legs ended:", {pb.LegEndReason.Name(r): traffic.reasons.count(r) for r in range(1, 9)})
    system.wait_idle()
    pulled = [s.value for s in system.metrics().find("tasuki_worker_kv_pulled_blocks_total")]
    assert len(pulled) == 2 and min(pulled) > 0, "traffic was not crossed"


def test_two_mixed_workers_behind_the_router_finish(
    tiny_model: Path, deploy: Callable[[Options], Deployment]
) -> None:
    """The same load as the router itself would place it."""
    references = known_requests(
        tiny_model, REQUESTS, prompt_lengths=(330, 17, 200, 90), steps=STEPS, seed=6
    )
    options = ("--max-model-len", str(MAX_LEN), "--kv-memory", str(BLOCKS * BLOCK_BYTES))
    system = deploy(Options(tiny_model, mixed=2, worker=options))
    ask = system.http.complete
    answers = system.gather(
        [lambda r=r: ask(r.prompt_tokens, max_tokens=STEPS) for r in references]
    )
    for reference, answer in zip(references, answers, strict=True):
        assert answer.tokens == reference.tokens, reference.name
    output = system.metrics().find("tasuki_worker_output_tokens_total")
    assert len(output) == 2 and min(s.value for s in output) > 0, "one worker did it all"
