"""One worker that is slower than its peers."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from tasuki.doctor.chance import share_by_chance
from tasuki.doctor.picture import Fleet, Probe, Worker
from tasuki.doctor.result import Finding, Outcome

_SLOWER = 1.6  # than the others' median
_MOST_ROUNDS = 0.75  # of the rounds, it must be the slowest
_LEAST_ROUNDS = 5
_MOST_CHANCE = 0.01  # that an equal worker is the slowest so often
_SLOWER_BY_METRICS = 2.0  # the load is not the same on all
_LEAST_TOKENS = 1000  # a prompt of another client stalls many of them, for up to 100 times as long
_BUSIER = 1.5

_REMEDY = (
    "compare its machine with the others': clocks and power limits (nvidia-smi -q -d CLOCK),"
    " other processes, CPU limits of its container, its settings"
)
_PARTS: dict[str, Callable[[Probe], float]] = {
    "to the first token": lambda probe: probe.ttft_s,
    "a token": lambda probe: probe.tpot_s,
}


def slow_worker(fleet: Fleet) -> Outcome:
    """By paired probes where there are some, else by the workers' own metrics."""
    outcome = Outcome()
    for group in comparable(fleet):
        if len(group) < 2:
            continue
        probed = _probed(group)
        _by_probes(probed, outcome)
        _by_metrics(group, [each for each in group if each not in probed], outcome)
    lonely = [
        f"{each.name} ({each.probe_error})" if each.probe_error else each.name
        for group in comparable(fleet)
        if len(group) < 2
        for each in group
    ]
    if lonely:
        outcome.unseen.append(f"nothing to compare with: {', '.join(lonely)}")
    return outcome


def looks_slow(fleet: Fleet) -> bool:
    """Whether a worker is slow by its probes so far, perhaps by chance."""
    outcome = Outcome()
    for group in comparable(fleet):
        _by_probes(_probed(group), outcome, most_chance=1.0)
    return bool(outcome.findings)


def comparable(fleet: Fleet) -> list[list[Worker]]:
    """Workers that should be equally quick: the same role, or the same hardware and idle."""
    groups: dict[tuple[str, ...], list[Worker]] = {}
    for worker in fleet.workers:
        hardware = worker.config.get("device", ""), worker.config.get("tensor_parallel", "")
        known_idle = all(hardware) and not any(worker.scrapes.all("running"))
        role = "idle" if known_idle else worker.role
        groups.setdefault((worker.engine, worker.model, role, *hardware), []).append(worker)
    return list(groups.values())


def _probed(group: Sequence[Worker]) -> list[Worker]:
    return [each for each in group if len(each.probes) >= _LEAST_ROUNDS]


def _by_probes(
    group: Sequence[Worker], outcome: Outcome, most_chance: float = _MOST_CHANCE
) -> None:
    if len(group) < 2:
        return
    outcome.looked_at.append(f"paired probes of {', '.join(each.name for each in group)}")
    for worker in group:
        others = [each for each in group if each is not worker]
        if _is_busier(worker, others):
            outcome.unseen.append(f"{worker.name} has more to do than its peers: no comparison")
            continue
        for part, of in _PARTS.items():
            finding = _slower(worker, others, part, of)
            if finding is None:
                continue
            rounds, slowest = (int(finding.figures[name]) for name in ("rounds", "slowest_in"))
            if share_by_chance(slowest, rounds, 1 / len(group)) <= most_chance:
                outcome.findings.append(finding)
                break
            outcome.unseen.append(
                f"whether {worker.name} is slower {part}: it was the slowest in {slowest} of"
                f" {rounds} rounds, which may be chance: ask more often (--probe-rounds,"
                " --probe-budget-s)"
            )


def _is_busier(worker: Worker, others: Sequence[Worker]) -> bool:
    mine = worker.scrapes.mean("running") or 0.0
    theirs = [each.scrapes.mean("running") or 0.0 for each in others]
    return mine > _BUSIER * statistics.median(theirs) + 1.0


def _slower(
    worker: Worker, others: Sequence[Worker], part: str, of: Callable[[Probe], float]
) -> Finding | None:
    mine = {probe.round: of(probe) for probe in worker.probes}
    theirs = {
        round_: [of(p) for each in others for p in each.probes if p.round == round_]
        for round_ in mine
    }
    rounds = [round_ for round_ in mine if theirs[round_]]
    if len(rounds) < _LEAST_ROUNDS:
        return None
    usual = statistics.median(value for round_ in rounds for value in theirs[round_])
    own = statistics.median(mine[round_] for round_ in rounds)
    lost = sum(mine[round_] > 1.2 * max(theirs[round_]) for round_ in rounds)
    if own < _SLOWER * usual or lost < _MOST_ROUNDS * len(rounds):
        return None
    return Finding(
        f"{worker.name} is {own / usual:.1f} times as slow as its peers",
        (
            f"paired probes: {1e3 * own:.1f} ms {part} (median of {len(rounds)} rounds), the others"
            f" {1e3 * usual:.1f} ms; it was the slowest in {lost} of {len(rounds)} rounds",
        ),
        _REMEDY,
        (worker.name,),
        {"seconds": own, "others_seconds": usual, "rounds": len(rounds), "slowest_in": lost},
    )


def _by_metrics(group: Sequence[Worker], judged: Sequence[Worker], outcome: Outcome) -> None:
    """Those that were not probed, by the pace that they report."""
    paces = {id(each): pace for each in group if (pace := _pace(each)) is not None}
    silent = [each.name for each in judged if id(each) not in paces]
    if silent:
        rounds = max(len(each.probes) for each in judged)
        few = f"only {rounds} rounds of probes, where {_LEAST_ROUNDS} are needed (--probe-budget-s)"
        probes = few if rounds else "no probes"
        why = next((each.probe_error for each in judged if each.probe_error), probes)
        outcome.unseen.append(
            f"the pace of {', '.join(silent)}: {why}, and too few tokens in the window:"
            f" {_LEAST_TOKENS} are needed (--window-s)"
        )
    if len(paces) < 2:
        return
    for worker in judged:
        others = [each for each in group if each is not worker and id(each) in paces]
        if id(worker) not in paces or not others:
            continue
        outcome.looked_at.append(f"the pace that {worker.name} reports")
        own, usual = paces[id(worker)], statistics.median(paces[id(each)] for each in others)
        if own < _SLOWER_BY_METRICS * usual or _is_busier(worker, others):
            continue
        outcome.findings.append(
            Finding(
                f"{worker.name} is {own / usual:.1f} times as slow as its peers",
                (
                    f"{worker.scrapes.source('itl_sum' if _has_itl(worker) else 'decode_step_s')}:"
                    f" {1e3 * own:.1f} ms, the others {1e3 * usual:.1f} ms, in"
                    f" {worker.scrapes.window_s:.0f} s",
                ),
                _REMEDY,
                (worker.name,),
                {"seconds": own, "others_seconds": usual},
            )
        )


def _has_itl(worker: Worker) -> bool:
    return worker.scrapes.last("itl_count") is not None


def _pace(worker: Worker) -> float | None:
    """Seconds a token in the window, or of a decode step; None: too few."""
    if _has_itl(worker):
        count, total = worker.scrapes.gained("itl_count"), worker.scrapes.gained("itl_sum")
        return total / count if count and total and count >= _LEAST_TOKENS else None
    if (worker.scrapes.gained("output_tokens") or 0.0) < _LEAST_TOKENS:
        return None
    return worker.scrapes.mean("decode_step_s") or None
