"""Small requests of ours: to each worker in turn, through routers again, split over a pair.

Workers are asked one after the other in rounds, so that what disturbs the machine disturbs all
of them alike, and each round begins with another worker.
"""

from __future__ import annotations

import random
import string
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tasuki.doctor.http import FailedError, Http, LateError, NoAnswerError, not_answered
from tasuki.doctor.picture import Pair, Probe, Router, Worker
from tasuki.doctor.servers import EngineServer

PROMPT_WORDS = 160
PROMPT_TOKENS = 256
ANSWER_TOKENS = 16
_LONGEST_PAUSE_S = 0.1  # without it, round robin in step with the load finds many in a row
_PAIR_TRIES = 3
_TICKET = ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")

Timed = Callable[[int], Probe]
"""Sends the request of this round to one worker."""


class SplitError(NoAnswerError):
    """A request could not be split, by the fault of one side."""

    def __init__(self, why: str, side: Literal["prefill", "decode"]) -> None:
        super().__init__(why)
        self.side = side


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is asked.

    Attributes:
        rounds: Requests to each worker; three times as many where one looks slow.
        budget_s: No further round begins after it. The added rounds have as long again, and so
            have prompts that are sent twice.
    """

    rounds: int = 7
    budget_s: float = 60.0


def prompt(seed: object, words: int = PROMPT_WORDS) -> str:
    """Words that no cache has: their first letters differ from every other prompt's."""
    draw = random.Random(f"{seed}")
    return " ".join("".join(draw.choices(string.ascii_lowercase, k=5)) for _ in range(words))


def completion(model: str, text: str, tokens: int) -> dict[str, Any]:
    """A greedy request for so many tokens."""
    return {
        "model": model,
        "prompt": text,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
    }


def time_workers(
    subjects: list[tuple[Worker, Timed]], plan: Plan, looks_slow: Callable[[], bool]
) -> None:
    """Adds probes to each worker, or why there are none. The first round warms up.

    Args:
        looks_slow: Whether one of them is slow by its probes so far. Then all get twice as many
            again: on a busy machine one of two equal workers may be the slowest in six of seven
            rounds by chance.
    """
    _time(subjects, range(plan.rounds + 1), plan.budget_s)
    if looks_slow():
        _time(subjects, range(plan.rounds + 1, 3 * plan.rounds + 1), plan.budget_s)


def _time(subjects: list[tuple[Worker, Timed]], rounds: range, budget_s: float) -> None:
    began = time.monotonic()
    for round_ in rounds:
        if round_ > rounds.start and time.monotonic() - began > budget_s:
            break
        turn = round_ % max(1, len(subjects))
        for worker, timed in subjects[turn:] + subjects[:turn]:
            if worker.probe_error:
                continue
            try:
                probe = timed(round_)
            except NoAnswerError as error:
                worker.probe_error = str(error)
                late = isinstance(error, LateError) and not any(worker.scrapes.all("waiting"))
                worker.fails = late or isinstance(error, FailedError)
                continue
            if round_:
                worker.probes.append(probe)


def timed_over_http(server: EngineServer, run: str, prefill: EngineServer | None) -> Timed:
    """Requests to a vLLM or SGLang server.

    Args:
        server: That is timed.
        run: Makes its prompts differ from those of other looks.
        prefill: Computes the prompts before, where the server decodes for others. Prompts that
            it computed itself would be taken for a fault by this look and all later ones.
    """

    def timed(round_: int) -> Probe:
        body = completion(server.worker.model, prompt(f"{run} {round_}"), ANSWER_TOKENS)
        if prefill is not None:
            own = f"{run} {round_} {server.worker.name}"  # a ticket is for one server
            body["prompt"] = prompt(own)
            body["kv_transfer_params"] = _prefill(prefill.http, {**body, "max_tokens": 1})
        return server.http.timed("/v1/completions", body, round_)

    return timed


def repeat(router: Router, http: Http, run: str, plan: Plan, is_open: Callable[[], bool]) -> None:
    """Sends prompts twice through a router: do they go where they are cached?

    Args:
        is_open: Whether more prompts are needed to tell.
    """
    began = time.monotonic()
    try:
        while is_open() and time.monotonic() - began <= plan.budget_s:
            seed = f"{run} again {len(router.repeats)}"
            body = completion(router.model, prompt(seed, 2 * PROMPT_WORDS), 1)
            _cached(http, body)
            time.sleep(random.uniform(0.0, _LONGEST_PAUSE_S))
            router.repeat_tokens, cached = _cached(http, body)
            router.repeats.append(cached)
    except NoAnswerError as error:
        router.repeat_error = str(error)
        router.fails = isinstance(error, FailedError)


def _cached(http: Http, body: Mapping[str, Any]) -> tuple[int, int]:
    """Tokens of a prompt, and how many of them were cached."""
    answer = http.post("/v1/completions", body)
    if answer.status != 200:
        raise not_answered(answer.status, answer.body)
    usage = answer.object("usage")
    details = usage.get("prompt_tokens_details") or {}
    if details.get("cached_tokens") is None:
        raise NoAnswerError(
            "answers do not say how many prompt tokens were cached"
            " (--enable-prompt-tokens-details of vLLM, --enable-cache-report of SGLang)"
        )
    return int(usage.get("prompt_tokens") or 0), int(details["cached_tokens"])


def split(pair: Pair, prefill: EngineServer, decode: EngineServer, run: str) -> None:
    """Splits a request over two vLLM workers as a router does, and sees what decode loaded.

    Decode's metrics count everyone's requests, so it counts only where ours was the only one
    that ended there meanwhile.
    """
    for attempt in range(_PAIR_TRIES):
        body = completion(pair.decode.model, prompt(f"{run} {pair.name} {attempt}"), 2)
        try:
            ticket = _prefill(prefill.http, {**body, "max_tokens": 1})
            before = _counts(decode)
            answer = decode.http.post("/v1/completions", {**body, "kv_transfer_params": ticket})
            if answer.status != 200:
                text = " ".join(answer.body.split())[:160]
                why = f"decode answers status {answer.status}: {text}"
                raise SplitError(why, "decode") if answer.status >= 500 else NoAnswerError(why)
            tokens = int(answer.object("usage").get("prompt_tokens") or 0)
            gained = _settled(decode, before)
        except SplitError as error:
            pair.probe_fault = str(error), error.side
            return
        except NoAnswerError as error:
            pair.probe_error = str(error)
            return
        if gained["requests"] == 1 and tokens:
            pair.probe, pair.probe_error = min(1.0, gained["prompt_loaded"] / tokens), ""
            return
        pair.probe_error = "others' requests ended on decode at the same time"


def _prefill(http: Http, body: Mapping[str, Any]) -> Mapping[str, Any]:
    asked = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
    answer = http.post("/v1/completions", {**body, "kv_transfer_params": asked})
    if answer.status != 200:
        raise NoAnswerError(f"prefill answers status {answer.status}")
    ticket = answer.object("kv_transfer_params")
    missing = [name for name in _TICKET if ticket.get(name) is None]
    if missing:  # decode would wait for ever
        raise SplitError(f"prefill's kv_transfer_params lack {', '.join(missing)}", "prefill")
    return dict(ticket)


def _counts(server: EngineServer) -> dict[str, float]:
    values = server.values()
    return {name: values.get(name, 0.0) for name in ("requests", "prompt_loaded")}


def _settled(server: EngineServer, before: Mapping[str, float]) -> dict[str, float]:
    """What was counted since, once the request itself is: metrics come after the answer."""
    deadline = time.monotonic() + 3.0
    while True:
        now = _counts(server)
        gained = {name: now[name] - before[name] for name in now}
        if gained["requests"] >= 1 or time.monotonic() > deadline:
            return gained
        time.sleep(0.1)
