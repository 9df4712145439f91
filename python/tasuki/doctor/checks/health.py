"""Workers that are away, requests that fail, memory that is full."""

from __future__ import annotations

from tasuki.doctor.chance import is_above
from tasuki.doctor.picture import Fleet, Reading, Router, Worker, growth
from tasuki.doctor.result import Finding, Outcome

_LEAST_REQUESTS = 5
_ERROR_SHARE = 0.01
_PREEMPTED_SHARE = 0.05
_REFUSED_SHARE = 0.05  # as the alert TasukiRequestsRefused
_LEAST_SCRAPES = 4  # any memory is full for a moment
_FULL = 0.85  # on average: what waits next needs more than the rest
# Statuses: 4xx are the clients', and 503 is the answer to too much load and to probes at the start.
_OUR_FAULT = ("500", "502", "504")
_READ_LOG = "read its log at that time: an error there has the cause"
_READ_LOG_OR_WAIT = f"{_READ_LOG}; without one it may only be slow: wait longer (--timeout-s)"


def workers(fleet: Fleet) -> Outcome:
    """Workers that do not answer, are down, failing, or have stopped reporting."""
    outcome = Outcome()
    for where, why in fleet.silent.items():
        outcome.findings.append(
            Finding(
                f"{where} does not answer",
                (why,),
                "start it, correct the address, or open the way to it from here",
                (where,),
            )
        )
    for worker in fleet.workers:
        last = worker.scrapes.last
        why = ""
        if last("up") == 0:
            why = f"{worker.scrapes.source('up')} is 0: the router is not connected to it"
        elif last("failing"):
            why = f"{worker.scrapes.source('failing')} is 1: it failed several requests in a row"
        if why:
            outcome.findings.append(
                Finding(
                    f"{worker.name} does not serve",
                    (why,),
                    "read the last lines of its log, and start it again",
                    (worker.name,),
                )
            )
        outcome.looked_at.append(worker.name)
    outcome.unseen += [f"metrics of {where}: {why}" for where, why in fleet.unread.items()]
    return outcome


def errors(fleet: Fleet) -> Outcome:
    """Requests that fail by the fleet's fault."""
    outcome = Outcome()
    failed = [(each.name, each.repeat_error) for each in fleet.routers if each.fails]
    failed += [(each.name, each.probe_error) for each in fleet.workers if each.fails]
    for name, why in failed:
        outcome.findings.append(
            Finding(
                f"{name} failed a small request", (f"probe: {why}",), _READ_LOG_OR_WAIT, (name,)
            )
        )
    for router in fleet.routers:
        if router.engine == "tasuki":
            outcome.looked_at.append(router.name)
            _router_errors(router, outcome)
    for worker in fleet.workers:
        scrapes = worker.scrapes
        requests = scrapes.recent("requests", "requests", _LEAST_REQUESTS)
        if requests is None:
            continue
        outcome.looked_at.append(worker.name)
        for name in ("errors", "http_errors"):
            found = scrapes.recent(name, "requests", _LEAST_REQUESTS)
            if found is None or not _fails(worker.name, found.value, requests, outcome):
                continue
            outcome.findings.append(
                Finding(
                    f"{worker.name} fails requests",
                    (
                        f"{scrapes.source(name)}: {found.value:.0f} of {requests.value:.0f}"
                        f" requests {found.when}",
                    ),
                    _READ_LOG,
                    (worker.name,),
                    {name: found.value, "requests": requests.value},
                )
            )
    return outcome


def _fails(name: str, failed: float, requests: Reading, outcome: Outcome) -> bool:
    """Whether more requests fail than may; the outcome says if that cannot be told."""
    if is_above(failed, requests.value, _ERROR_SHARE):
        return True
    if failed >= max(1.0, _ERROR_SHARE * requests.value):
        why = (
            f"whether {name} fails more than {_ERROR_SHARE:.0%} of its requests: {failed:.0f} of"
            f" {requests.value:.0f} {requests.when} are too few to tell: look for longer"
            " (--window-s)"
        )
        if name in outcome.looked_at:  # the other metric may have said so already
            outcome.looked_at.remove(name)
            outcome.unseen.append(why)
    return False


def _router_errors(router: Router, outcome: Outcome) -> None:
    """What a Tasuki router could not serve: in the window, or since the start if it is quiet."""
    requests = router.scrapes.recent("requests", "requests", _LEAST_REQUESTS)
    if requests is None:
        return
    windowed = requests.when.startswith("in ")

    def counted(metric: str) -> dict[str, float]:
        return {
            reason: growth(before, after) if windowed else after
            for (name, reason), (before, after) in router.by_reason.items()
            if name == metric
        }

    refused = counted("tasuki_requests_total").get("refused", 0.0)
    if is_above(refused, requests.value, _REFUSED_SHARE):
        outcome.findings.append(
            Finding(
                f"{refused:.0f} of {requests.value:.0f} requests were refused: the load is above"
                " what the workers serve within the limits",
                (f'tasuki_requests_total{{outcome="refused"}} {requests.when}: {refused:.0f}',),
                "add workers (`tasuki plan` says which), or loosen --ttft-target-ms and"
                " --max-queued-*",
                (router.name,),
                {"refused": refused, "requests": requests.value},
            )
        )
    for metric in ("tasuki_failures_total", "tasuki_http_errors_total"):
        by_reason = counted(metric)
        if metric == "tasuki_http_errors_total":
            by_reason = {code: n for code, n in by_reason.items() if code in _OUR_FAULT}
        elif "overload" in by_reason:  # the rest found no worker
            by_reason["overload"] = max(0.0, by_reason["overload"] - refused)
        by_reason.pop("client", None)
        total = sum(by_reason.values())
        if not _fails(router.name, total, requests, outcome):
            continue
        said = ", ".join(f"{reason}: {n:.0f}" for reason, n in sorted(by_reason.items()) if n)
        outcome.findings.append(
            Finding(
                f"{total:.0f} of {requests.value:.0f} requests failed",
                (f"{metric} {requests.when}: {said}",),
                "look the kind up in docs/troubleshooting.md; the router's log names the worker",
                (router.name,),
                {"failed": total, "requests": requests.value},
            )
        )
        return  # the other metric counts the same requests


def preemptions(fleet: Fleet) -> Outcome:
    """Requests that lose their KV for want of memory and are computed again."""
    outcome = Outcome()
    for worker in fleet.workers:
        scrapes = worker.scrapes
        total, gained = scrapes.last("preemptions"), scrapes.gained("preemptions")
        if total is None or gained is None:
            continue
        ended = scrapes.recent("requests", "requests", _LEAST_REQUESTS)
        running = scrapes.mean("running") or 0.0
        of = ended.value if ended and ended.when.startswith("in ") else max(running, 1.0)
        if worker.engine == "tasuki":  # only its router counts requests
            gains = (router.scrapes.gained("requests") for router in fleet.routers)
            counts = [count for count in gains if count is not None]
            of = max(of, sum(counts))
            if not counts:
                outcome.unseen.append(
                    f"how many requests {worker.name} has ended: give the router's address too"
                )
                continue
        few = gained < max(2.0, _PREEMPTED_SHARE * of)
        if not few and not is_above(gained, of, _PREEMPTED_SHARE):
            outcome.unseen.append(
                f"whether {worker.name} preempts more than {_PREEMPTED_SHARE:.0%} of its requests:"
                f" {gained:.0f} of {of:.0f} are too few to tell: look for longer (--window-s)"
            )
            continue
        outcome.looked_at.append(worker.name)
        if few:
            continue
        outcome.findings.append(
            Finding(
                f"{worker.name} preempts requests and computes them again",
                (
                    f"{scrapes.source('preemptions')}: {gained:.0f} in {scrapes.window_s:.0f} s,"
                    f" {total:.0f} since its start; {running:.1f} requests ran on average",
                ),
                "give it more KV memory, or let fewer run at once (vLLM: --max-num-seqs, SGLang:"
                " --max-running-requests, Tasuki: --max-running-requests)",
                (worker.name,),
                {"preemptions": gained},
            )
        )
    return outcome


def full_memory(fleet: Fleet) -> Outcome:
    """KV memory that is full while requests wait."""
    outcome = Outcome()
    for worker in fleet.workers:
        used, waiting = worker.scrapes.all("kv_used"), _waiting(worker)
        if not used:
            outcome.unseen.append(f"{worker.name} does not show how full its KV memory is")
            continue
        if len(used) < _LEAST_SCRAPES:
            outcome.unseen.append(
                f"whether the KV memory of {worker.name} stays full: its metrics were read"
                f" {len(used)} times, where {_LEAST_SCRAPES} are needed: look for longer"
                " (--window-s)"
            )
            continue
        outcome.looked_at.append(worker.name)
        full = sum(used) / len(used)
        if full >= _FULL and sum(each > 0 for each in waiting) >= 0.8 * len(waiting) > 0:
            mean = sum(waiting) / len(waiting)
            outcome.findings.append(
                Finding(
                    f"{worker.name} has too little KV memory, and {mean:.1f} requests wait for it",
                    (
                        f"{worker.scrapes.source('kv_used')}: {full:.0%} on average;"
                        f" {worker.scrapes.source('waiting')}: {mean:.1f} on average in"
                        f" {worker.scrapes.window_s:.0f} s",
                    ),
                    "add workers of this role, or give it more KV memory (or an fp8 KV cache)",
                    (worker.name,),
                    {"kv_used_share": full, "waiting": mean},
                )
            )
    return outcome


def _waiting(worker: Worker) -> list[float]:
    found = worker.scrapes.all("waiting")
    return found or worker.scrapes.all("decode_queue")
