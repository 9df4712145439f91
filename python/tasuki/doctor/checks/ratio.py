"""Too few workers of one role while those of the other have room."""

from __future__ import annotations

from collections.abc import Sequence

from tasuki.doctor.picture import Fleet, Worker
from tasuki.doctor.result import Finding, Outcome

_PERSISTENT = 0.8  # of the scrapes
_BUSY = 0.6  # a queue that lasts says more than the share of the time
_ROOM = 0.5
_FULL = 0.85  # of the KV memory
_LEAST_SCRAPES = 4
_LEAST_REQUESTS = 15  # one burst of a few long prompts lasts as long as the window


def ratio(fleet: Fleet) -> Outcome:
    """A queue on one side that lasts, and room on the other."""
    outcome = Outcome()
    models = [_sides(workers) for workers in fleet.peers()]
    split = [sides for sides in models if all(sides.values())]
    halves = fleet.of_role("prefill", "decode") and not fleet.of_role("mixed")
    if not split and (halves or not fleet.workers):
        outcome.unseen.append("only one role is known: say the others' (…?role=prefill)")
    for sides in split:
        model = f" of {sides['prefill'][0].model}" if len(split) > 1 else ""
        _judge(fleet, sides, model, outcome)
    return outcome


def _sides(workers: Sequence[Worker]) -> dict[str, list[Worker]]:
    return {role: [w for w in workers if w.role == role] for role in ("prefill", "decode")}


def _judge(fleet: Fleet, sides: dict[str, list[Worker]], model: str, outcome: Outcome) -> None:
    """Of the workers of one model; `model` names it where there are several."""
    counts = [len(w.scrapes.values) for side in sides.values() for w in side]
    if min(counts) < _LEAST_SCRAPES:
        outcome.unseen.append(f"how busy the workers{model} are: metrics of some are missing")
        return
    busy = {role: _busy(side) for role, side in sides.items()}
    queued = {role: _queued(side) for role, side in sides.items()}
    admission = _admission(fleet)
    shape = f"{len(sides['prefill'])} prefill : {len(sides['decode'])} decode{model}"
    seen = (
        f"{shape}, busy {busy['prefill']:.0%} : {busy['decode']:.0%}, queue"
        f" {queued['prefill']:.0%} : {queued['decode']:.0%} of the time"
    )
    for short, other in (("prefill", "decode"), ("decode", "prefill")):
        waits = max(queued[short], admission if busy[short] >= _BUSY else 0.0)
        if waits < _PERSISTENT or busy[short] < _BUSY:
            continue
        if busy[other] > _ROOM or queued[other] >= _PERSISTENT:
            continue
        happened = _happened(fleet, sides[short])
        if happened < _LEAST_REQUESTS:
            outcome.unseen.append(
                f"whether {seen}, is the wrong ratio: requests wait for {short}, but"
                f" {happened:.0f} ended, ran or waited, where {_LEAST_REQUESTS} are needed: look"
                " for longer (--window-s)"
            )
            return
        outcome.findings.append(
            Finding(
                f"{shape} is the wrong ratio: requests wait for {short}, {other} has room",
                (
                    f"{short} busy {busy[short]:.0%}, {other} {busy[other]:.0%}"
                    f" ({_how_busy(sides[short][0])})",
                    f"requests waited for {short} in {waits:.0%} of the scrapes, for {other} in"
                    f" {queued[other]:.0%}",
                ),
                (not model and fleet.advice) or _remedy(short, other, sides),
                tuple(each.name for each in sides[short]),
                {f"{role}_busy_share": share for role, share in busy.items()},
            )
        )
    outcome.looked_at.append(seen)


def _happened(fleet: Fleet, workers: Sequence[Worker]) -> float:
    """How many requests of a side ended in the window, ran or waited: what it is judged by."""
    ended = [worker.scrapes.gained("requests") for worker in workers]
    if workers[0].engine == "tasuki":  # only routers count requests
        ended = [router.scrapes.gained("requests") for router in fleet.routers]
    names = ("running", "waiting", "prefill_queue", "decode_queue")
    held = [worker.scrapes.mean(name) for worker in workers for name in names]
    held += [router.scrapes.mean("admission_waiting") for router in fleet.routers]
    return sum(count or 0.0 for count in (*ended, *held))


def _remedy(short: str, other: str, sides: dict[str, list[Worker]]) -> str:
    give = len(sides[other]) > 1
    change = (
        f"make one of the {other} workers a {short} worker" if give else f"add a {short} worker"
    )
    return f"{change}, or let workers do both roles; `tasuki plan` says what each ratio gives"


def _busy(workers: Sequence[Worker]) -> float:
    """How much of the time, or of its room, the busiest half of a side is in use."""
    shares = sorted(_busy_one(worker) for worker in workers)
    return sum(shares) / len(shares)


def _busy_one(worker: Worker) -> float:
    """Of Tasuki's workers by their pace; of others by requests that run, and memory in use.

    A decode worker that always runs something may still have room: its steps take many
    sequences. So of engines that show no pace the memory in use counts for decode.
    """
    scrapes = worker.scrapes
    window_s = scrapes.window_s
    if worker.engine == "tasuki" and window_s:
        if worker.role == "prefill":
            pace, computed = scrapes.mean("prefill_tokens_per_s"), scrapes.gained("prompt_computed")
            if pace and computed is not None:
                return min(1.0, computed / pace / window_s)
        step, steps = scrapes.mean("decode_step_s"), scrapes.gained("steps")
        if step and steps is not None:
            return min(1.0, step * steps / window_s)
    running = scrapes.all("running")
    at_work = sum(each > 0 for each in running) / max(1, len(running))
    if worker.role == "prefill":
        # A gauge that is set when a step ends shows nothing of prompts that come one at a time.
        until_first_token_s = scrapes.gained("ttft_sum")
        if until_first_token_s is not None and window_s:
            at_work = max(at_work, min(1.0, until_first_token_s / window_s))
        return at_work
    return at_work if _waits(worker) >= _PERSISTENT else scrapes.mean("kv_used") or 0.0


def _how_busy(worker: Worker) -> str:
    ours = ("prompt_computed", "prefill_tokens_per_s", "steps", "decode_step_s")
    theirs = ("running", "ttft_sum", "waiting", "kv_used")
    return worker.scrapes.source(*(ours if worker.engine == "tasuki" else theirs))


def _queued(workers: Sequence[Worker]) -> float:
    """In which share of the scrapes requests waited for room on this side."""
    shares = [_waits(worker) for worker in workers]
    return sum(shares) / len(shares)


def _waits(worker: Worker) -> float:
    """Of one worker. What waits on decode for KV that prefill still computes does not count."""
    scrapes = worker.scrapes
    waiting = scrapes.all("waiting")
    if worker.role == "decode":
        waiting = scrapes.all("waiting_capacity") or waiting
    if worker.role == "decode" and worker.engine == "tasuki":
        used = scrapes.all("kv_used")
        waiting = [n if full >= _FULL else 0.0 for n, full in zip(waiting, used, strict=False)]
    own = scrapes.all("prefill_queue" if worker.role == "prefill" else "decode_queue")
    moments = max(len(waiting), len(own))
    waits = [
        any(each[at] > 0 for each in (waiting, own) if at < len(each)) for at in range(moments)
    ]
    return sum(waits) / max(1, moments)


def _admission(fleet: Fleet) -> float:
    """In which share of the scrapes requests waited in a Tasuki router."""
    shares = [
        sum(each > 0 for each in waiting) / len(waiting)
        for router in fleet.routers
        if (waiting := router.scrapes.all("admission_waiting"))
    ]
    return max(shares, default=0.0)
