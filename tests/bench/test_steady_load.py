"""A load that goes on, before a worker that is told what to say."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import cycle
from queue import SimpleQueue
from typing import Any

import pytest

from tasuki.bench.errors import RunFailedError
from tasuki.bench.steady_load import planned_ahead
from tasuki.v1 import worker_pb2 as pb

INFO = pb.WorkerInfo(vocab_size=50, max_model_len=100, num_blocks=64, block_size=16)


class Worker:
    """Answers each request with its tokens, one a step; as early as `ahead_s` says."""

    def __init__(self, ahead_s: Iterable[float], reason: Any = pb.LEG_END_FINISHED) -> None:
        self.sent: SimpleQueue[Any] = SimpleQueue()
        self.submits: list[Any] = []
        self.most = 0
        self._ahead_s = ahead_s
        self._reason = reason

    def __iter__(self) -> Iterator[pb.WorkerMessage]:
        yield pb.WorkerMessage(info=INFO)
        running: dict[str, int] = {}
        for ahead_s in self._ahead_s:
            while not self.sent.empty() or not running:
                submit = self.sent.get(timeout=5).submit
                self.submits.append(submit)
                running[submit.request_id] = submit.sampling.max_tokens
            self.most = max(self.most, len(running))
            running = {name: left - 1 for name, left in running.items()}
            over = [name for name, left in running.items() if left == 0]
            step = pb.StepReport(
                outputs=[pb.Output(request_id=name) for name in running],
                ended=[pb.LegEnd(request_id=name, reason=self._reason) for name in over],
                load=pb.Load(planned_ahead_s=ahead_s),
            )
            running = {name: left for name, left in running.items() if left}
            yield pb.WorkerMessage(step=step)


def test_it_is_the_mean_while_requests_come_and_end() -> None:
    worker = Worker(cycle([0.002, 0.004]))
    assert planned_ahead(iter(worker), worker.sent, 3, while_s=0.2) == pytest.approx(3e-3, rel=0.2)
    assert len(worker.submits) > 3, "none came later"
    assert worker.most == 3
    longest = INFO.max_model_len // 2
    assert all(1 <= len(each.prompt_tokens) < longest for each in worker.submits)
    assert len({len(each.prompt_tokens) for each in worker.submits}) > 1


def test_all_its_requests_fit_into_a_small_pool() -> None:
    worker = Worker(cycle([0.002]))
    planned_ahead(iter(worker), worker.sent, 32, while_s=0.0)
    fair = INFO.num_blocks * INFO.block_size // 32
    lengths = [len(each.prompt_tokens) + each.sampling.max_tokens for each in worker.submits]
    assert len(lengths) >= 32 and max(lengths) <= fair // 2


@pytest.mark.parametrize(
    ("worker", "says"),
    [
        (Worker([0.002] * 3), "ended its stream in the middle of a load"),
        (Worker(cycle([0.002]), pb.LEG_END_FAILED), "ended early"),
    ],
)
def test_a_load_that_breaks_off_is_no_measurement(worker: Worker, says: str) -> None:
    with pytest.raises(RunFailedError, match=says):
        planned_ahead(iter(worker), worker.sent, 2, while_s=30.0)
