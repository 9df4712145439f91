"""What lies between two steps, by the reports of a worker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import pytest

from tasuki.bench import between_timer
from tasuki.bench.between_timer import Report, between_s, lone_requests, medians, period_s
from tasuki.bench.errors import RunFailedError
from tasuki.v1 import worker_pb2 as pb


def reports(count: int, pause_s: float, *, batch: int = 4, first: int = 1) -> list[Report]:
    """Steps of 10 ms, one after the other with a pause between them."""
    return [
        Report(
            at_s=number * (0.010 + pause_s),
            step=number,
            outputs=batch,
            sample=number,
            sequences=batch,
            duration_s=0.010,
        )
        for number in range(first, first + count)
    ]


def test_the_pause_is_what_steps_leave_of_the_time_between_reports() -> None:
    assert between_s(reports(20, 0.0007), 4) == pytest.approx(0.0007)
    assert between_s(reports(20, 0.0), 4) == pytest.approx(0.0, abs=1e-9)
    # A clock that reads late makes no time negative.
    assert between_s(reports(20, -0.001), 4) == 0.0


def test_only_steps_of_this_batch_that_follow_one_another_count() -> None:
    steady = reports(20, 0.001, first=6)
    joining = reports(5, 0.5, batch=3)
    assert between_s([*joining, *steady], 4) == pytest.approx(0.001)
    # A step between them was lost, and what came before it is too short.
    assert between_s([*reports(5, 0.5), *reports(20, 0.001, first=9)], 4) == pytest.approx(0.001)
    # Another sequence was decoded with them, and got no token that is told here.
    beside = [replace(report, sequences=5) for report in reports(20, 0.5)]
    assert between_s(beside, 4) is None
    assert between_s(reports(6, 0.001), 4) is None
    assert between_s(reports(20, 0.001), 8) is None
    assert between_s([], 1) is None


def test_the_period_counts_reports_in_a_row_whatever_the_numbers_of_their_steps() -> None:
    # Where steps overlap, a launch and a collection are a turn each.
    apart = [replace(report, step=2 * report.step, sample=0) for report in reports(20, 0.001)]
    assert between_s(apart, 4) is None
    assert period_s(apart, 4) == pytest.approx(0.011)
    joining = [replace(report, outputs=3) for report in reports(5, 0.5)]
    assert period_s([*joining, *apart], 4) == pytest.approx(0.011)
    assert period_s(apart[:6], 4) is None
    assert period_s(apart, 8) is None


def test_the_median_is_of_the_loads_in_which_there_is_something() -> None:
    loads = {4: [reports(20, pause_s) for pause_s in (0.003, 0.001, 0.002)], 8: [reports(20, 0.0)]}
    loads[4].append(reports(3, 0.5))  # too short
    assert medians(loads, between_s) == {4: pytest.approx(0.002)}
    assert medians({}, between_s) == {}


STEP_S = 0.2


class Clock:
    """Goes by what is slept, however long a busy machine takes."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def perf_counter(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


class Stream:
    """A worker's answers: two sequences decode beside `lone` requests, `STEP_S` each."""

    def __init__(self, clock: Clock, lone: int, queue_s: float, prefill_s: float) -> None:
        self.sent: SimpleQueue[Any] = SimpleQueue()
        self._clock = clock
        self._lone = lone
        self._timings = pb.LegTimings(queue_s=queue_s, prefill_s=prefill_s)

    def __iter__(self) -> Iterator[pb.WorkerMessage]:
        yield pb.WorkerMessage(info=pb.WorkerInfo(vocab_size=50, max_model_len=100))
        beside = [self._submitted().request_id for _ in range(2)]
        for name in beside:  # the second one begins later
            yield pb.WorkerMessage(step=pb.StepReport(outputs=[pb.Output(request_id=name)]))
        for _ in range(self._lone):
            submit = self._submitted()
            assert (len(submit.prompt_tokens), submit.sampling.max_tokens) == (64, 1)
            yield self._step()
            self._clock.sleep(STEP_S)
            yield self._step(submit.request_id)
        yield self._step(beside[0])

    def _submitted(self) -> pb.Submit:
        submit: pb.Submit = self.sent.get(timeout=5).submit
        return submit

    def _step(self, *ended: str) -> pb.WorkerMessage:
        reason, timings = pb.LEG_END_FINISHED, self._timings
        ends = [pb.LegEnd(request_id=name, reason=reason, timings=timings) for name in ended]
        return pb.WorkerMessage(step=pb.StepReport(ended=ends))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(between_timer, "time", made)
    return made


def test_messages_take_what_the_workers_account_leaves_of_a_lone_request(clock: Clock) -> None:
    stream = Stream(clock, lone=3, queue_s=0.05, prefill_s=0.1)
    found = list(lone_requests(iter(stream), stream.sent, 2))
    assert [seen.messages_s for seen in found] == [pytest.approx(0.05)] * 3
    assert [(seen.worker_s, seen.context) for seen in found] == [(pytest.approx(0.15), 9.0)] * 3


def test_lone_requests_come_in_all_parts_of_a_step_alike(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    apart: list[float] = []
    monkeypatch.setattr(clock, "sleep", apart.append)
    stream = Stream(clock, lone=48, queue_s=0.0, prefill_s=0.0)
    assert len(list(lone_requests(iter(stream), stream.sent, 2))) == 48
    for step_s in (0.003, 0.006, 0.007):
        ours = [seconds for seconds in apart if seconds != STEP_S]
        quarters = Counter(int(seconds % step_s / step_s * 4) for seconds in ours)
        assert all(8 <= quarters[quarter] <= 16 for quarter in range(4)), step_s


def test_a_worker_that_ends_its_stream_is_named(clock: Clock) -> None:
    stream = Stream(clock, lone=0, queue_s=0.0, prefill_s=0.0)
    messages = (message for message in stream if not message.step.ended)
    with pytest.raises(RunFailedError, match="ended its stream"):
        list(lone_requests(messages, stream.sent, 2))
