"""Times steps of a serving worker, and what lies between two: it writes messages, and reads others.

`EngineTimer` calls an engine directly, so its steps follow one another at once. A worker whose
steps are computed by its own process pauses between them. On a GPU the next step runs meanwhile,
but the threads that write and read delay its launch. Here a worker is a child, and this process is
its router. The pause is what is left of the time between two reports without the time of the step,
which the report has.

Beside that, what a lone request takes that comes while others decode: in the worker, by its own
account (in the queue, and of its prompt), and for its messages, which is what else its sender waits
for its first token.
"""

from __future__ import annotations

import os
import random
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from queue import SimpleQueue
from statistics import median
from typing import Any

import grpc

from tasuki.bench.child import end_child, explain, start_child
from tasuki.bench.errors import RunFailedError
from tasuki.bench.steady_load import planned_ahead
from tasuki.bench.worker_stream import SILENT, require_finished, step_reports, submit
from tasuki.kv.fleet import DIRECT
from tasuki.launch.process import describe_exit
from tasuki.options import arguments
from tasuki.v1.worker_pb2_grpc import WorkerStub
from tasuki.worker.config import WorkerConfig

_PROMPT_TOKENS = 8
_ANSWER_TOKENS = 64
_BESIDE_TOKENS = 512  # of answers beside which lone requests come
LONE_PROMPT_TOKENS = 64
_LONE_REQUESTS = 48  # at most, one after the other
_APART_S = 0.02  # between two of them, at most
_GOLDEN = 0.618034  # of it the next one comes later: so they come in all parts of a step alike
MEAN_CONTEXT = _PROMPT_TOKENS + _ANSWER_TOKENS // 2  # of a sequence that is measured
_LEAST_STEPS = 8
_START_S = 600.0
_ANSWER_S = 300.0
_END_S = 20.0
_LOOK_EVERY_S = 0.1


@dataclass(frozen=True, slots=True)
class Report:
    """What the router gets at the end of a step.

    Attributes:
        at_s: When it came.
        step: Its number; each step of the worker has the next one.
        outputs: Sequences that got a token.
        sample: Number of the last step that only decoded, for the engine.
        sequences: That this step decoded.
        duration_s: Of this step.
        ahead_s: How long before a step's end the next one is planned; 0: steps do not overlap.
    """

    at_s: float
    step: int
    outputs: int
    sample: int
    sequences: int
    duration_s: float
    ahead_s: float = 0.0


def between_s(reports: Sequence[Report], batch: int) -> float | None:
    """Seconds between two steps that decode `batch` sequences, in the mean over the longest run.

    Args:
        reports: In order.
        batch: Sequences in a step.

    Returns:
        None where there were too few such steps, one after the other.
    """
    runs: list[list[Report]] = [[]]
    for report in reports:
        last = runs[-1][-1] if runs[-1] else None
        follows = last is None or (report.step - last.step, report.sample - last.sample) == (1, 1)
        if report.outputs != batch or report.sequences != batch:
            runs.append([])
        elif follows:
            runs[-1].append(report)
        else:
            runs.append([report])
    longest = max(runs, key=len)
    steps = len(longest) - 1
    if steps < _LEAST_STEPS:
        return None
    passed_s = longest[-1].at_s - longest[0].at_s
    return max(0.0, (passed_s - sum(report.duration_s for report in longest[1:])) / steps)


def period_s(reports: Sequence[Report], batch: int) -> float | None:
    """Seconds from one step that gives `batch` sequences a token to the next, in the mean.

    As `between_s`. Where steps overlap, a step's number and its sample come apart; every report
    in a row is of one step.
    """
    runs: list[list[float]] = [[]]
    for report in reports:
        if report.outputs == batch:
            runs[-1].append(report.at_s)
        else:
            runs.append([])
    longest = max(runs, key=len)
    steps = len(longest) - 1
    return (longest[-1] - longest[0]) / steps if steps >= _LEAST_STEPS else None


Loads = dict[int, list[list[Report]]]


@dataclass(frozen=True, slots=True)
class Lone:
    """A request of `LONE_PROMPT_TOKENS` and one token of answer, beside sequences that decode.

    Attributes:
        messages_s: Its messages, there and back.
        worker_s: From its coming to the worker until its first token, by the worker's account.
        context: Tokens of each sequence beside it, at its end.
    """

    messages_s: float
    worker_s: float
    context: float


@dataclass(frozen=True, slots=True)
class Served:
    """What a worker that serves was seen to do, by the sequences that it decodes.

    Attributes:
        loads: Reports of loads whose requests begin together.
        lone: The middle of lone requests; none beside the largest load, which leaves no room.
        ahead: See `planned_ahead`; none where steps do not overlap.
    """

    loads: Loads
    lone: dict[int, Lone]
    ahead: dict[int, float]


def serve_loads(config: WorkerConfig, batches: Sequence[int], repeat: int) -> Served:
    """`repeat` loads of each size, lone requests beside them, and loads that go on.

    Args:
        config: Of the worker, which is started for it.
        batches: Sequences in a step.
        repeat: Loads of each size, after one that warms up.

    Raises:
        RunFailedError: The worker did not start or answer.
    """
    found: Loads = {batch: [] for batch in batches}
    lone: dict[int, Lone] = {}
    ahead: dict[int, float] = {}
    draw = random.Random(0)
    with _worker(config) as where, _every_core():
        for number in range(repeat + 1):
            for batch in draw.sample(list(batches), len(batches)):
                reports = list(_reports(where, batch, number))
                if number:
                    found[batch].append(reports)
        for batch in sorted(batches)[:-1]:
            with _stream(where) as (call, outgoing):
                seen = list(lone_requests(call, outgoing, batch))
            if seen:
                lone[batch] = Lone(*map(median, zip(*map(astuple, seen), strict=True)))
        if any(report.ahead_s for each in found.values() for load in each for report in load):
            for batch in sorted(batches):
                with _stream(where) as (call, outgoing):
                    ahead[batch] = planned_ahead(call, outgoing, batch)
    return Served(found, lone, ahead)


def medians(
    loads: Loads, look: Callable[[Sequence[Report], int], float | None]
) -> dict[int, float]:
    """What `between_s` or `period_s` finds in loads, by size, where it finds anything."""
    found = {
        batch: [seconds for each in reports if (seconds := look(each, batch)) is not None]
        for batch, reports in loads.items()
    }
    return {batch: median(seconds) for batch, seconds in found.items() if seconds}


@contextmanager
def _every_core() -> Iterator[None]:
    """Let this process run on every core of the machine, as a router does that has its own.

    Where it is pinned to the worker's cores, it would else take time from the worker.
    """
    before = os.sched_getaffinity(0)
    _pin(set(range(os.cpu_count() or 1)))
    try:
        yield
    finally:
        _pin(before)


def _pin(cores: set[int]) -> None:
    for task in os.listdir("/proc/self/task"):
        try:
            os.sched_setaffinity(int(task), cores)
        except OSError:  # the thread has ended, or the cores are not for us
            continue


@contextmanager
def _worker(config: WorkerConfig) -> Iterator[str]:
    """Address of a worker on the cores that this process has now."""
    with tempfile.TemporaryDirectory(prefix="tasuki-between-") as folder:
        log = Path(folder) / "worker.log"
        words = ["worker", "--model", str(config.model), "--role", "mixed", "--port", "0"]
        process = start_child([*words, *arguments(config)], log)
        try:
            yield _await_ready(process, log)
        finally:
            end_child(process, _END_S)


def _await_ready(process: subprocess.Popen[bytes], log: Path) -> str:
    until_s = time.monotonic() + _START_S
    while time.monotonic() < until_s:
        code = process.poll()
        for line in log.read_text(errors="replace").splitlines():
            if line.startswith("ready "):
                return line.removeprefix("ready ").strip()
        if code is not None:
            raise RunFailedError(f"the worker ended ({describe_exit(code)}): {explain(log)}")
        time.sleep(_LOOK_EVERY_S)
    raise RunFailedError(f"the worker was not ready after {_START_S:g} s: {explain(log)}")


def _reports(where: str, batch: int, number: int) -> Iterator[Report]:
    """The reports of so many requests, which begin together, until all have ended."""
    with _stream(where) as (call, outgoing):
        yield from _read(call, outgoing, batch, number)


@contextmanager
def _stream(where: str) -> Iterator[tuple[Any, SimpleQueue[Any]]]:
    """A router's stream to the worker: what comes, and where to put what is sent."""
    outgoing: SimpleQueue[Any] = SimpleQueue()
    with grpc.insecure_channel(where, options=DIRECT) as channel:
        stub: Any = WorkerStub  # generated without types
        call = stub(channel).Serve(iter(outgoing.get, None), timeout=_ANSWER_S)
        try:
            yield call, outgoing
        except grpc.RpcError as error:
            raise RunFailedError(f"the worker does not answer: {error.details()}") from error
        finally:
            call.cancel()
            outgoing.put(None)


def _read(call: Any, outgoing: SimpleQueue[Any], batch: int, number: int) -> Iterator[Report]:
    left = batch
    for message in call:
        if message.HasField("info"):
            for index in range(batch):
                name, room = f"between-{number}-{index}", message.info.max_model_len
                answer = min(_ANSWER_TOKENS, room - _PROMPT_TOKENS - 1)
                outgoing.put(submit(name, index + 1, message.info, _PROMPT_TOKENS, answer))
        if not message.HasField("step"):
            continue
        step, last = message.step, message.step.load.last_decode
        if step.outputs:
            yield Report(
                at_s=time.perf_counter(),
                step=step.step,
                outputs=len(step.outputs),
                sample=last.number,
                sequences=last.sequences,
                duration_s=last.duration_s,
                ahead_s=step.load.planned_ahead_s,
            )
        for end in step.ended:
            require_finished(end)
        left -= len(step.ended)
        if not left:
            return


def lone_requests(call: Any, outgoing: SimpleQueue[Any], batch: int) -> Iterator[Lone]:
    """Send lone requests while others decode.

    Args:
        call: What the worker sends.
        outgoing: What it is sent.
        batch: Sequences that decode.

    Yields:
        One request after the other, until the first of the others is at its end.

    Raises:
        RunFailedError: An answer ended early, or the stream did.
    """
    starting = {f"beside-{index}" for index in range(batch)}
    given = 0
    steps = step_reports(call)
    for message in call:
        if message.HasField("info"):
            info = message.info
            break
    else:
        raise RunFailedError(SILENT)
    answer = min(_BESIDE_TOKENS, info.max_model_len - _PROMPT_TOKENS - 1)
    for number, name in enumerate(sorted(starting), 1):
        outgoing.put(submit(name, number, info, _PROMPT_TOKENS, answer))
    while starting:
        outputs = next(steps).outputs
        starting -= {output.request_id for output in outputs}
        given += len(outputs)
    prompt = min(LONE_PROMPT_TOKENS, info.max_model_len - 2)
    for number in range(batch + 1, batch + 1 + _LONE_REQUESTS):
        time.sleep(_APART_S * (number * _GOLDEN % 1.0))
        sent_s = time.perf_counter()
        outgoing.put(submit(f"lone-{number}", number, info, prompt, answer=1))
        ended: list[Any] = []
        while not ended:
            step = next(steps)
            ended = list(step.ended)
            given += len(step.outputs)
        passed_s = time.perf_counter() - sent_s
        for end in ended:
            require_finished(end)
        if any(end.request_id != f"lone-{number}" for end in ended):
            return  # the others are at their end
        worker_s = ended[0].timings.queue_s + ended[0].timings.prefill_s
        yield Lone(passed_s - worker_s, worker_s, _PROMPT_TOKENS + given / batch)
