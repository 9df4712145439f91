"""Faults of every kind under load of every kind: no request is lost, no answer is wrong.

Three prefill and three decode workers, a minute of it. For longer, and for other schedules:

    make chaos                                  # 10 minutes, a new seed
    make chaos CHAOS_S=3600 CHAOS_SEED=7

A failure prints what to add to `REGRESSIONS`.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support.chaos import cases, schedule
from support.chaos.asking import Choice, Document
from support.chaos.conductor import Conductor, Done
from support.chaos.load import Load, Tally
from support.chaos.schedule import Fault, Kind
from support.chaos.ties import Ties
from support.deployment import Deployment, Options
from support.waiting import free_port

SECONDS = float(os.environ.get("TASUKI_CHAOS_S", "60"))
SEED = os.environ.get("TASUKI_CHAOS_SEED", "1")
pytestmark = [pytest.mark.faults, pytest.mark.timeout(3 * SECONDS + 600)]

CLIENTS = 12
LOST_IN_A_ROW = 4
"""`MachineConfig::max_losses_in_a_row`."""
# A request may be on a worker that is silent, be placed again on another one that falls
# silent, and so on; each silence is noticed after LOST_S. The rest is for its computation and
# for a slow reader, on two cores that everything shares.
MOST_S = LOST_IN_A_ROW * schedule.LOST_S + 20.0
# Runs of 10 minutes grow by 1 MB. In 4,000 requests, as many, a leak of 2 KB each exceeds this.
MOST_GROWTH_BYTES = 8e6


@dataclass(frozen=True)
class Run:
    """One run: its faults follow from the seed unless they are given."""

    seed: int
    seconds: float = 60.0
    faults: Sequence[Fault] = field(default=(), repr=False)


def _seed() -> int:
    return random.SystemRandom().randrange(2**32) if SEED == "random" else int(SEED)


REGRESSIONS: list[Run] = []


@pytest.fixture(scope="module")
def admin_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def system(
    tiny_model: Path, deploy_for_module: Callable[[Options], Deployment], admin_port: int
) -> Deployment:
    worker = ("--kv-memory", "16000000", "--max-batched-tokens", "256", "--lease-s", "6")
    router = ("--admin-port", str(admin_port), "--recover-s", "60")
    return deploy_for_module(
        Options(tiny_model, prefill=3, decode=3, worker=worker, router=router, relayed=True)
    )


@pytest.fixture(scope="module")
def known(system: Deployment, tiny_model: Path) -> list[cases.Case]:
    return asyncio.run(cases.known(port_of(system), Ties(tiny_model)))


def port_of(system: Deployment) -> int:
    return int(system.url.rpartition(":")[2])


@pytest.mark.parametrize("seed", range(20))
def test_a_schedule_leaves_half_of_the_workers_alone(seed: int) -> None:
    workers = [f"{role}-{number}" for role in ("prefill", "decode") for number in range(3)]
    planned = schedule.faults(seed, 60, workers)
    assert planned == schedule.faults(seed, 60, workers)
    assert {fault.kind for fault in planned} == set(Kind)
    for fault in planned:
        hit = [f for f in planned if f.at_s <= fault.at_s < f.at_s + f.for_s]
        left = set(workers) - {f.worker for f in hit}
        assert len(hit) <= 3
        assert {name.partition("-")[0] for name in left} == {"prefill", "decode"}


def test_an_answer_that_rests_on_rounding_is_found(tiny_model: Path) -> None:
    """At its 21st token the number drawn for choice 1 is 3e-7 from the border of 80 and 81."""
    [body] = [body for name, _, body in cases.requests() if name == "choices-0"]
    tokens = [312, 150, 43, 463, 467, 2, 13, 412, 414, 507, 149, 409, 360, 47, 398, 230, 463]
    tokens += [423, 356, 422, 80]
    ties = Ties(tiny_model)
    for count in (20, 21):
        answer = Document()
        for index in (0, 1):
            answer.choices[index] = Choice(tokens=tokens[: count * index])
        assert ties.rests_on_rounding(body, answer) == (count == 21)
    greedy = {**body, "temperature": 0}
    assert not ties.rests_on_rounding(greedy, answer)


def test_any_difference_of_an_answer_is_found() -> None:
    choice: dict[str, Any] = {
        "index": 0,
        "text": "ab",
        "token_ids": [1, 2],
        "finish_reason": "stop",
    }
    choice["logprobs"] = {"token_logprobs": [None, -1.0]}
    whole: dict[str, Any] = {
        "choices": [choice],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2},
    }

    def answer(**changes: Any) -> Document:
        document = Document()
        usage = changes.pop("usage", whole["usage"])
        document.take({"choices": [{**choice, **changes}], "usage": usage})
        return document

    assert not cases.difference(answer(), answer())
    for change in (
        {"index": 1},
        {"text": "ac"},
        {"token_ids": [1, 2, 2]},
        {"finish_reason": "length"},
        {"logprobs": {"token_logprobs": [None, -1.1]}},
        {"logprobs": {"token_logprobs": [-1.0]}},
        {"usage": {"prompt_tokens": 3, "completion_tokens": 3}},
    ):
        assert cases.difference(answer(**change), answer()), change
    streamed = Document()
    for at in range(2):
        part: dict[str, Any] = {"index": 0, "text": "ab"[at], "token_ids": [at + 1]}
        part["logprobs"] = {"token_logprobs": [choice["logprobs"]["token_logprobs"][at]]}
        streamed.take({"choices": [part]})
    streamed.take({"choices": [{"index": 0, "finish_reason": "stop"}], "usage": whole["usage"]})
    assert not cases.difference(streamed, answer())


def test_a_worker_that_was_ended_is_left_alone_until_it_is_back(
    system: Deployment, admin_port: int
) -> None:
    conductor = Conductor(system, admin_port)
    twice = [Fault(0.0, Kind.RESTART, "decode-0", 1.0), Fault(0.0, Kind.RESTART, "decode-0", 0.1)]
    try:
        done = conductor.run(twice)
    finally:
        conductor.close()
    assert [each.fault for each in done] == twice


@pytest.mark.parametrize("run", [Run(_seed(), SECONDS), *REGRESSIONS], ids=repr)
def test_nothing_is_lost(
    run: Run, system: Deployment, known: list[cases.Case], admin_port: int
) -> None:
    assert system.router is not None
    faults = run.faults or schedule.faults(run.seed, run.seconds, list(system.workers))
    conductor = Conductor(system, admin_port)
    before = system.router.anonymous_bytes()
    load = Load(port_of(system), known, CLIENTS, run.seed)
    try:
        done = conductor.run(faults)
        tally = load.end(MOST_S)
        system.wait_idle()
        grown = system.router.anonymous_bytes() - before
        report(system, done, tally, grown)
        assert not (troubles := tally.troubles()), "\n".join(troubles[:20])
        assert tally.kinds() == {case.name.rpartition("-")[0] for case in known}
        assert tally.longest().took_s < MOST_S, tally.longest()
        assert grown < MOST_GROWTH_BYTES
        assert system.metrics().sum("tasuki_requests_in_flight") == 0
        assert not [worker for worker in conductor.workers() if worker["legs"]]
        check_faults(done)
    except BaseException as error:
        error.add_note(f"Run({run.seed}, {run.seconds}, [\n" + "\n".join(map(str, faults)) + "\n])")
        error.add_note("carried out:\n" + "\n".join(map(str, conductor.done)))
        error.add_note(system.logs())
        raise
    finally:
        conductor.close()


def check_faults(done: list[Done]) -> None:
    """Every kind of fault has struck a worker with requests."""
    struck = Counter(each.fault.kind for each in done if each.legs)
    assert set(struck) == set(Kind), struck


def report(system: Deployment, done: list[Done], tally: Tally, grown: int) -> None:
    """Prints what happened."""
    kinds = Counter(each.fault.kind.value for each in done)
    at_work = sum(each.legs > 0 for each in done)
    print(
        f"faults: {dict(kinds)}; {at_work} of {len(done)} on workers with requests, "
        f"{sum(each.legs for each in done)} legs"
    )
    retries = system.metrics().find("tasuki_retries_total")
    print("retries:", {tuple(each.labels.values()): int(each.value) for each in retries})
    print(f"requests: {len(tally.outcomes)}, {tally.by_manner()}")
    longest = tally.longest()
    print(
        f"median {tally.median_s():.2f} s, longest {longest.took_s:.1f} s ({longest.case}); "
        f"the router has grown by {grown / 1e6:.1f} MB"
    )
