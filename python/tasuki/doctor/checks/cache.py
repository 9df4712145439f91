"""A prefix cache that works, and a routing that does not use it.

Prompts are sent twice. With N workers, a router that ignores caches sends the second request to
the cached worker in 1/N of the cases. A router that uses caches does so unless that worker is busy.
A sequential likelihood ratio test tells them apart: prompts are sent until one is improbable.

Source: A. Wald, Sequential Tests of Statistical Hypotheses, 1945.
"""

from __future__ import annotations

import math

from tasuki.doctor.picture import Fleet, Router, Worker
from tasuki.doctor.result import Finding, Outcome

_FOUND = 0.5  # of a prompt that was sent again
_FALSE_ALARMS = 0.01  # at most, of routers that find (1 + 1/N) / 2 or more
_MISSES = 0.01  # at most, of routers that find 1/N
_LEAST_PROMPTS = 8  # one busy moment spoils several in a row
_MOST_PROMPTS = 128  # of two workers: one decision in 200 is still open
_REPEATING = 0.02  # of the load's prompt tokens were cached: prompts do begin alike
_LEAST_PROMPT_TOKENS = 1000


def routing(fleet: Fleet) -> Outcome:
    """A prompt that is sent again must go where it is cached, if the load repeats prompts."""
    outcome = Outcome()
    if not fleet.routers and len(_prefilling(fleet)) > 1:
        outcome.unseen.append("requests go through a router: give its URL too")
    for router in fleet.routers:
        workers = _prefilling(fleet, router.model)
        if len(workers) < 2:
            continue
        if router.repeat_error or not router.repeats:
            why = router.repeat_error or "no probes"
            outcome.unseen.append(f"prompts sent twice through {router.name}: {why}")
            continue
        if _uses_caches(router, len(workers)) is not None:
            outcome.looked_at.append(f"{len(router.repeats)} prompts sent twice to {router.name}")
        _judge(router, workers, outcome)
    return outcome


def is_open(fleet: Fleet, router: Router) -> bool:
    """Whether more prompts have to be sent twice through this router."""
    if len(router.repeats) < _LEAST_PROMPTS:
        return True
    workers = _prefilling(fleet, router.model)
    if len(workers) < 2 or len(router.repeats) >= _MOST_PROMPTS:
        return False
    return _uses_caches(router, len(workers)) is None and _caches_matter(workers, Outcome())


def _prefilling(fleet: Fleet, model: str = "") -> list[Worker]:
    """Those that prompts of this model may go to; all if none is known to serve it."""
    able = [each for each in fleet.workers if each.role != "decode"]
    return [each for each in able if each.model == model] or able


def _found(router: Router) -> int:
    return sum(each >= _FOUND * router.repeat_tokens for each in router.repeats)


def _uses_caches(router: Router, workers: int) -> bool | None:
    """Whether the router routes by cached prompts; None: it cannot be told yet.

    The hypotheses are that it finds a cached prompt with probability 1/N, and with (1 + 1/N) / 2.
    Their ratio is (N + 1) / 2 for each prompt that is found, and 1/2 for each one that is not.
    """
    found = _found(router)
    missed = len(router.repeats) - found
    log_ratio = found * math.log((workers + 1) / 2) - missed * math.log(2)
    if log_ratio >= -math.log(_MISSES):
        return True
    return False if log_ratio <= math.log(_FALSE_ALARMS) else None


def _judge(router: Router, workers: list[Worker], outcome: Outcome) -> None:
    uses = _uses_caches(router, len(workers))
    if uses or not _caches_matter(workers, outcome):
        return
    found, sent = _found(router), len(router.repeats)
    if uses is None:
        how = "under another load" if sent >= _MOST_PROMPTS else "with a longer --probe-budget-s"
        outcome.unseen.append(
            f"whether {router.name} uses the prefix caches: it cannot be told, {found} of {sent}"
            f" prompts sent twice were found, and one that ignores the caches of {len(workers)}"
            f" workers finds {1 / len(workers):.0%}: look again {how}"
        )
        return
    cached, total, when = _load(workers)
    sources = workers[0].scrapes.source("prompt_cached", "prompt_computed", "prompt_tokens")
    outcome.findings.append(
        Finding(
            "the routing does not use the workers' prefix caches",
            (
                f"of {sent} prompts of {router.repeat_tokens} tokens, sent twice,"
                f" {found} were found in a cache (usage.prompt_tokens_details.cached_tokens); a"
                f" router that ignores the caches finds {1 / len(workers):.0%}",
                f"of the load's {total:.0f} prompt tokens {cached / total:.0%} were cached {when}"
                f" on {len(workers)} workers ({sources})",
            ),
            "route by prefix: Tasuki's router without --policy, vllm-router and sglang-router with"
            " --policy cache_aware",
            (router.name,),
            {"found_share": found / sent, "load_cached_share": cached / total},
        )
    )


def _caches_matter(workers: list[Worker], outcome: Outcome) -> bool:
    """Whether a router should look for caches; if not, the outcome says why."""
    if all(each.config.get("prefix_caching") == "False" for each in workers):
        outcome.unseen.append("no worker has a prefix cache (vLLM: --enable-prefix-caching)")
        return False
    cached, total, when = _load(workers)
    if total < _LEAST_PROMPT_TOKENS:
        outcome.unseen.append(
            f"whether the load repeats prompts: {total:.0f} prompt tokens {when}, where"
            f" {_LEAST_PROMPT_TOKENS} are needed: look for longer (--window-s)"
        )
        return False
    if cached / total < _REPEATING:
        outcome.looked_at.append(
            f"{cached / total:.1%} of {total:.0f} prompt tokens were cached"
            f" {when}: the load does not repeat prompts"
        )
        return False
    return True


def _load(workers: list[Worker]) -> tuple[float, float, str]:
    """Prompt tokens that were cached, all of them, and when: of the clients' requests.

    In the window alone: since the start there are also prompts of earlier looks, sent twice.
    """
    cached = total = 0.0
    for worker in workers:
        gained = worker.scrapes.gained
        hit, computed = gained("prompt_cached") or 0.0, gained("prompt_computed")
        cached += hit
        total += hit + computed if computed is not None else (gained("prompt_tokens") or 0.0)
    return cached, total, f"in {max(each.scrapes.window_s for each in workers):.0f} s"
