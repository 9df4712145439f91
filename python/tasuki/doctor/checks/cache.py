"""A prefix cache that works, and a routing that does not use it."""

from __future__ import annotations

from tasuki.doctor.picture import Fleet, Router, Worker
from tasuki.doctor.result import Finding, Outcome

_FOUND = 0.5  # of a prompt that was sent again
_USELESS_SHARE = 0.75  # of the prompts found: one of two workers has half of them by chance
_REPEATING = 0.02  # of the load's prompt tokens were cached: prompts do begin alike
_LEAST_PROMPT_TOKENS = 1000
_LEAST_PROMPTS = 4


def routing(fleet: Fleet) -> Outcome:
    """A prompt that is sent again must go where it is cached, if the load repeats prompts."""
    outcome = Outcome()
    prefilling = [each for each in fleet.workers if each.role != "decode"]
    if len(prefilling) < 2:
        return outcome
    if not fleet.routers:
        outcome.unseen.append("requests go through a router: give its URL too")
    for router in fleet.routers:
        if router.repeat_error or len(router.repeats) < _LEAST_PROMPTS:
            why = router.repeat_error or "no probes"
            outcome.unseen.append(f"prompts sent twice through {router.name}: {why}")
            continue
        outcome.looked_at.append(f"{len(router.repeats)} prompts sent twice to {router.name}")
        _judge(router, prefilling, outcome)
    return outcome


def _judge(router: Router, workers: list[Worker], outcome: Outcome) -> None:
    found = sum(each >= _FOUND * router.repeat_tokens for each in router.repeats)
    share = found / len(router.repeats)
    if share > _USELESS_SHARE:
        return
    if all(each.config.get("prefix_caching") == "False" for each in workers):
        outcome.unseen.append("no worker has a prefix cache (vLLM: --enable-prefix-caching)")
        return
    cached, total, when = _load(workers)
    if total < _LEAST_PROMPT_TOKENS:
        outcome.unseen.append(
            f"whether the load repeats prompts: {total:.0f} prompt tokens in the window"
        )
        return
    if cached / total < _REPEATING:
        outcome.looked_at.append(
            f"{cached / total:.1%} of {total:.0f} prompt tokens were cached"
            f" {when}: the load does not repeat prompts"
        )
        return
    sources = workers[0].scrapes.source("prompt_cached", "prompt_computed", "prompt_tokens")
    outcome.findings.append(
        Finding(
            "the routing does not use the workers' prefix caches",
            (
                f"of {len(router.repeats)} prompts of {router.repeat_tokens} tokens, sent twice,"
                f" {found} were found in a cache (usage.prompt_tokens_details.cached_tokens)",
                f"of the load's {total:.0f} prompt tokens {cached / total:.0%} were cached {when}"
                f" on {len(workers)} workers ({sources})",
            ),
            "route by prefix: Tasuki's router without --policy, vllm-router and sglang-router with"
            " --policy cache_aware",
            (router.name,),
            {"found_share": share, "load_cached_share": cached / total},
        )
    )


def _load(workers: list[Worker]) -> tuple[float, float, str]:
    """Prompt tokens that were cached, all of them, and when: of the clients' requests."""
    for windowed in (True, False):
        cached = total = 0.0
        for worker in workers:
            scrapes = worker.scrapes
            read = scrapes.gained if windowed else scrapes.last
            hit = read("prompt_cached") or 0.0
            computed = read("prompt_computed")
            cached += hit
            total += hit + computed if computed is not None else (read("prompt_tokens") or 0.0)
        if total >= _LEAST_PROMPT_TOKENS:
            window_s = max(each.scrapes.window_s for each in workers)
            return cached, total, f"in {window_s:.0f} s" if windowed else "since their start"
    return cached, total, "since their start"
