"""Who is asked how often, and what that says of equal workers and of a slow one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from tasuki.doctor import probes, rpc
from tasuki.doctor.checks import CHECKS
from tasuki.doctor.checks.speed import looks_slow, slow_worker
from tasuki.doctor.http import FailedError, Http, LateError, NoAnswerError, not_answered
from tasuki.doctor.look import Look, Settings
from tasuki.doctor.picture import Fleet, Probe, Worker
from tasuki.doctor.probes import Plan, Timed, time_workers
from tasuki.doctor.servers import EngineServer
from tasuki.v1 import worker_pb2 as pb
from tasuki.v1.worker_pb2_grpc import WorkerServicer, add_WorkerServicer_to_server

PLAN = Plan(rounds=7)
UNLUCKY = range(1, 8)
"""The first rounds that count."""


def compared(*seconds: Callable[[int], float], plan: Plan = PLAN) -> Fleet:
    """Workers that take so long in each round, as `tasuki doctor` times them."""

    def timed(of: Callable[[int], float]) -> Timed:
        def probe(round_: int) -> Probe:
            ttft_s = of(round_)
            return Probe(round_, ttft_s, ttft_s / 10)

        return probe

    fleet = Fleet([Worker(f"worker {number}", "tasuki", "mixed") for number in range(len(seconds))])
    subjects = [(worker, timed(of)) for worker, of in zip(fleet.workers, seconds, strict=True)]
    time_workers(subjects, plan, lambda: looks_slow(fleet))
    return fleet


def rounds(fleet: Fleet) -> Sequence[list[int]]:
    return [[probe.round for probe in worker.probes] for worker in fleet.workers]


def test_equal_workers_are_asked_once_a_round() -> None:
    fleet = compared(lambda _: 0.1, lambda _: 0.1)
    assert rounds(fleet) == [list(range(1, 8))] * 2
    assert not slow_worker(fleet).findings


def test_one_that_loses_the_first_rounds_by_chance_is_not_called_slow() -> None:
    fleet = compared(lambda _: 0.1, lambda round_: 0.3 if round_ in UNLUCKY else 0.1)
    assert rounds(fleet) == [list(range(1, 22))] * 2
    assert not slow_worker(fleet).findings


def test_one_that_stays_slow_is_found() -> None:
    fleet = compared(lambda _: 0.1, lambda _: 0.3)
    (finding,) = slow_worker(fleet).findings
    assert finding.what == "worker 1 is 3.0 times as slow as its peers"
    assert "the slowest in 21 of 21 rounds" in finding.evidence[0]


def test_one_that_stops_answering_is_asked_no_more() -> None:
    def breaks(round_: int) -> float:
        if round_ == 3:
            raise NoAnswerError("gone")
        return 0.1

    fleet = compared(lambda _: 0.1, breaks)
    assert rounds(fleet) == [list(range(1, 8)), [1, 2]]
    assert fleet.workers[1].probe_error == "gone"


def test_a_probe_that_fails_by_the_servers_fault_is_a_finding() -> None:
    for status, findings in ((500, 1), (502, 1), (503, 0), (404, 0)):

        def fails(round_: int, status: int = status) -> float:
            raise not_answered(status, "out of memory")

        fleet = compared(fails)
        found = CHECKS["errors"](fleet).findings
        assert len(found) == findings, status
        if findings:
            assert found[0].evidence == (f"probe: status {status}: out of memory",)


def test_a_probe_that_is_late_is_a_finding_unless_requests_wait_there() -> None:
    for waiting, findings in ((0.0, 1), (3.0, 0)):

        def late(round_: int) -> Probe:
            raise LateError(30.0)

        worker = Worker("worker", "tasuki", "mixed")
        worker.scrapes.add(0.0, {"waiting": waiting})
        time_workers([(worker, late)], PLAN, lambda: False)
        assert worker.probe_error == "no answer within 30 s (--timeout-s)"
        found = CHECKS["errors"](Fleet([worker])).findings
        assert len(found) == findings, waiting
        assert all("it may only be slow: wait longer" in each.remedy for each in found)


def test_a_worker_that_says_nothing_is_late() -> None:
    class Silent(WorkerServicer):
        def Serve(self, messages: Any, context: Any) -> Any:  # noqa: N802
            yield from (message for message in messages if not message)

    with ThreadPoolExecutor(1) as threads:
        server = grpc.server(threads)
        add_WorkerServicer_to_server(Silent(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        with pytest.raises(LateError, match=r"within 0\.3 s"):
            rpc.timed(f"127.0.0.1:{port}", None, 0.3, "run", 1, (8, 2))
        server.stop(None).wait()


def test_a_probe_without_an_answer_failed() -> None:
    with pytest.raises(FailedError, match="refused"):
        Http("http://127.0.0.1:1").timed("/v1/completions", {}, 1)


def test_the_added_rounds_have_as_long_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0

    def takes(seconds: float) -> Callable[[int], float]:
        def of(_: int) -> float:
            nonlocal now_s
            now_s += 5.0
            return seconds

        return of

    monkeypatch.setattr(probes, "time", SimpleNamespace(monotonic=lambda: now_s))
    fleet = compared(takes(0.1), takes(0.3), plan=Plan(rounds=7, budget_s=60.0))
    assert rounds(fleet) == [[*range(1, 7), *range(8, 15)]] * 2


def test_one_that_is_slow_by_its_metrics_alone_adds_no_rounds() -> None:
    fleet = Fleet([Worker(name, "vllm", "decode") for name in "ab"])
    for worker, step_s in zip(fleet.workers, (0.01, 0.05), strict=True):
        for tokens in (0.0, 1000.0):
            worker.scrapes.add(tokens, {"output_tokens": tokens, "decode_step_s": step_s})
    assert [finding.workers for finding in slow_worker(fleet).findings] == [("b",)]
    assert not looks_slow(fleet)


def test_only_servers_of_one_model_are_paired(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "split", lambda *_: None)
    look = Look(Settings())
    for model in ("m", "n"):
        for role in ("prefill", "decode"):
            served = Worker(f"{role} of {model}", "vllm", role, model)  # type: ignore[arg-type]
            look.servers.append(EngineServer(Http("http://127.0.0.1:1"), served))
    look._split("run")
    pairs = [pair.name for pair in look.fleet.pairs]
    assert pairs == ["prefill of m → decode of m", "prefill of n → decode of n"]


def test_workers_get_equal_prompts_that_no_earlier_look_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompts: list[list[int]] = []

    @contextmanager
    def stream(*_: object) -> Iterator[tuple[object, SimpleQueue[pb.RouterMessage]]]:
        sent: SimpleQueue[pb.RouterMessage] = SimpleQueue()
        info = pb.WorkerInfo(vocab_size=1000, max_model_len=4096)
        yield iter([pb.WorkerMessage(info=info)]), sent
        prompts.append(list(sent.get_nowait().submit.prompt_tokens))

    monkeypatch.setattr(rpc, "_stream", stream)
    for _ in range(2):
        look = Look(Settings())
        look.direct = {where: Worker(where, "tasuki", "mixed") for where in "ab"}
        look._probe()
    assert prompts[0] == prompts[1] != prompts[2] == prompts[3]


def test_why_a_lone_worker_was_not_probed_is_told() -> None:
    def overloaded(round_: int) -> float:
        raise not_answered(503, "too many requests")

    (unseen,) = slow_worker(compared(overloaded)).unseen
    assert unseen == "nothing to compare with: worker 0 (status 503: too many requests)"
