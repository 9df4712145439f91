"""Routers that ignore prefix caches, and those that use them: how many prompts tell them apart."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tasuki.doctor import probes
from tasuki.doctor.checks.cache import is_open, routing
from tasuki.doctor.http import Answer, Http
from tasuki.doctor.picture import Fleet, Router, Worker
from tasuki.doctor.probes import Plan

TOKENS = 512
MOST = 128
RUNS = 300


class Cached:
    """A fleet that answers and finds each prompt that it had before."""

    def __init__(self) -> None:
        self.prompts: list[str] = []

    def post(self, _: str, body: Mapping[str, Any]) -> Answer:
        cached = TOKENS if body["prompt"] in self.prompts else 0
        self.prompts.append(body["prompt"])
        usage = {"prompt_tokens": TOKENS, "prompt_tokens_details": {"cached_tokens": cached}}
        return Answer(200, "application/json", json.dumps({"usage": usage}))


def fleet_of(count: int, load_cached: float = 0.3) -> Fleet:
    """Workers under a load of which so much is cached, and their router."""
    workers = []
    for number in range(count):
        worker = Worker(f"worker {number}", "vllm", "mixed", "m")
        worker.scrapes.add(0.0, {"prompt_cached": 0.0, "prompt_computed": 0.0})
        grown = {"prompt_cached": 1e5 * load_cached, "prompt_computed": 1e5 * (1 - load_cached)}
        worker.scrapes.add(10.0, grown)
        workers.append(worker)
    return Fleet(workers, routers=[Router("r", "other")])


def looked_at(fleet: Fleet, is_found: Callable[[], bool]) -> Router:
    """Its router, after as many prompts as `tasuki doctor` sends twice."""
    (router,) = fleet.routers
    router.repeat_tokens = TOKENS
    while is_open(fleet, router):
        router.repeats.append(TOKENS if is_found() else 0)
    return router


def said(count: int, probability: float) -> Mapping[str, float]:
    """In which share of looks a router was accused or left open; the mean number of prompts."""
    draw = random.Random(f"{count} {probability}")
    accused = left_open = sent = 0
    fleet = fleet_of(count)
    for _ in range(RUNS):
        fleet.routers = [Router("r", "other")]
        sent += len(looked_at(fleet, lambda: draw.random() < probability).repeats)
        outcome = routing(fleet)
        accused += len(outcome.findings)
        left_open += len(outcome.unseen)
    return {"accused": accused / RUNS, "open": left_open / RUNS, "sent": sent / RUNS}


@pytest.mark.parametrize(("count", "sent"), [(2, 40), (4, 20), (8, 16)])
def test_a_router_that_ignores_caches_is_found(count: int, sent: float) -> None:
    seen = said(count, 1 / count)
    assert seen["accused"] >= 0.97
    assert seen["open"] <= 0.01
    assert seen["sent"] <= sent


@pytest.mark.parametrize(("count", "sent"), [(2, 40), (4, 20), (8, 16)])
def test_a_router_that_avoids_busy_workers_is_not_accused(count: int, sent: float) -> None:
    half_way = said(count, (1 + 1 / count) / 2)
    assert half_way["accused"] <= 0.02
    assert half_way["sent"] <= sent
    assert said(count, 0.9)["accused"] == 0


def test_few_prompts_are_enough_where_all_are_found_or_none() -> None:
    for found, sent in ((True, 12), (False, 8)):
        fleet = fleet_of(2)
        assert len(looked_at(fleet, lambda found=found: found).repeats) == sent
        assert len(routing(fleet).findings) == (not found)


@pytest.mark.parametrize("found", [6, 5, 4])
def test_few_misses_of_eight_call_for_more_prompts_and_accuse_nobody(found: int) -> None:
    """So few accused vLLM servers whose router used their caches, under a load that repeats."""
    fleet = fleet_of(2)
    (router,) = fleet.routers
    router.repeats, router.repeat_tokens = [TOKENS] * found + [0] * (8 - found), TOKENS
    outcome = routing(fleet)
    assert not outcome.findings and not outcome.looked_at
    assert f"it cannot be told, {found} of 8 prompts" in outcome.unseen[0]
    assert "a longer --probe-budget-s" in outcome.unseen[0]
    assert is_open(fleet, router)


def test_a_pause_before_the_second_request_varies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Round robin in step with the load would find many prompts in a row."""
    pauses: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: 0.0, sleep=pauses.append)
    monkeypatch.setattr(probes, "time", clock)
    fleet, http = fleet_of(2), cast(Http, Cached())
    probes.repeat(fleet.routers[0], http, "run", Plan(), partial(is_open, fleet, *fleet.routers))
    assert len(set(pauses)) == 12
    assert 0.0 <= min(pauses) < max(pauses) <= 0.1


def test_what_is_never_clear_ends_at_a_bound_and_is_told() -> None:
    fleet, turns = fleet_of(2), iter([True, True, False, True, False] * MOST)
    assert len(looked_at(fleet, lambda: next(turns)).repeats) == MOST
    outcome = routing(fleet)
    assert not outcome.findings
    assert "look again under another load" in outcome.unseen[0]


@pytest.mark.parametrize(("budget_s", "sent"), [(60.0, 12), (-1.0, 0)])
def test_each_prompt_is_sent_twice_within_the_budget(budget_s: float, sent: int) -> None:
    fleet, server = fleet_of(2), Cached()
    (router,) = fleet.routers
    plan, is_wanted = Plan(budget_s=budget_s), partial(is_open, fleet, router)
    probes.repeat(router, cast(Http, server), "run", plan, is_wanted)
    assert router.repeats == [TOKENS] * sent
    assert server.prompts[::2] == server.prompts[1::2]
    assert len(set(server.prompts)) == sent


def test_no_more_prompts_are_sent_than_matter() -> None:
    turns = iter([True, False] * MOST)
    never_repeats = fleet_of(2, load_cached=0.0)
    assert len(looked_at(never_repeats, lambda: next(turns)).repeats) == 8
    assert not routing(never_repeats).findings
    without = fleet_of(2)
    for worker in without.workers:
        worker.config["prefix_caching"] = "False"
    assert len(looked_at(without, lambda: False).repeats) == 8
    assert "no worker has a prefix cache" in routing(without).unseen[0]
    assert len(looked_at(fleet_of(1), lambda: next(turns)).repeats) == 8


def test_prompts_of_earlier_looks_are_no_load() -> None:
    fleet = fleet_of(2)
    for worker in fleet.workers:
        ended = worker.scrapes.values[-1]
        worker.scrapes.values[:] = [ended, ended]
    assert len(looked_at(fleet, lambda: False).repeats) == 8
    outcome = routing(fleet)
    assert not outcome.findings
    assert "0 prompt tokens in 10 s, where 1000 are needed" in outcome.unseen[0]


def test_only_workers_of_the_model_that_was_asked_for_count() -> None:
    """Another model's prompts repeat; this one's workers have no prefix cache."""
    fleet = fleet_of(2, load_cached=0.0)
    for other in fleet_of(2).workers:
        other.model = "n"
        fleet.workers.append(other)
    fleet.routers[0].model = "m"
    looked_at(fleet, lambda: False)
    assert not routing(fleet).findings
    del fleet.workers[0]
    outcome = routing(fleet)  # one worker of the model: there is nothing to choose
    assert not outcome.findings and not outcome.looked_at


def test_workers_of_a_model_by_another_name_count() -> None:
    fleet = fleet_of(2)
    fleet.routers[0].model = "an alias"
    looked_at(fleet, lambda: False)
    assert len(routing(fleet).findings) == 1


def test_answers_without_cached_tokens_are_told() -> None:
    fleet = fleet_of(2)
    fleet.routers[0].repeat_error = "answers do not say"
    assert "do not say" in routing(fleet).unseen[0]
