"""KV that did not get from prefill to decode: computed again, lost, or left behind."""

from __future__ import annotations

from tasuki.doctor.picture import Fleet, Pair, Worker, growth
from tasuki.doctor.result import Finding, Outcome

LEAST_REQUESTS = 5
# vLLM computes the last token of each prompt on decode, and what does not fill a block.
_MOST_COMPUTED = 0.10
_LEAST_TOKENS_A_REQUEST = 16
_LEAST_LOADED = 0.5  # of a probe's prompt
_LOST_SHARE = 0.002  # since the start; in the window a single one counts
_LEAST_STRANDED = 0.02  # of the pool
_LEAST_SCRAPES = 4  # at a single moment KV may wait for its reader
_SERVED = ("requests", "prompt_tokens", "prompt_computed")  # grow where requests come and go


def recomputed(fleet: Fleet) -> Outcome:
    """Prompts that decode workers compute although a prefill worker did."""
    outcome = Outcome()
    for pair in fleet.pairs:
        _probed(pair, outcome)
    for worker in fleet.of_role("decode"):
        if worker.engine == "vllm":
            _computed_on_decode(worker, outcome)
    for router in fleet.routers:
        if router.engine != "tasuki":
            continue
        outcome.looked_at.append(f"tasuki_recomputed_prompts_total of {router.name}")
        for (metric, reason), (before, after) in sorted(router.by_reason.items()):
            if metric == "tasuki_recomputed_prompts_total" and after > 0:
                outcome.findings.append(
                    Finding(
                        f"{after:.0f} prompts of vLLM workers were computed twice ({reason})",
                        (
                            f'{metric}{{reason="{reason}"}}: {after:.0f},'
                            f" {growth(before, after):.0f} of them in the window",
                        ),
                        _REMEDIES.get(reason, _REMEDIES["not_loaded"]),
                        (router.name,),
                        {"prompts": after},
                    )
                )
    unknown = [w.name for w in fleet.workers if w.engine == "vllm" and not w.role]
    if unknown and any(w.scrapes.last("kv_transfers") is not None for w in fleet.workers):
        outcome.unseen.append(
            f"which of {', '.join(unknown)} decode: say it, vllm://HOST:PORT?role=decode"
        )
    return outcome


_REMEDIES = {
    "no_ticket": "start prefill workers with --kv-transfer-config (NixlConnector)",
    "incomplete_ticket": "run one vLLM version on both sides, and do not change the fields between",
    "refused": "look for `handshake` and `Failed` in decode's log: model, dtype, KV layout and"
    " vLLM's version must be equal on both sides, and decode's block size a multiple of prefill's",
    "not_loaded": "pass prefill's kv_transfer_params on unchanged, and look for `handshake` and"
    " `Failed` in decode's log: model, dtype, block size and vLLM's version must be equal",
}


def _probed(pair: Pair, outcome: Outcome) -> None:
    if pair.probe_fault is not None:
        why, side = pair.probe_fault
        failed = side == "decode"
        outcome.findings.append(
            Finding(
                f"{pair.decode.name} cannot use KV of {pair.prefill.name}: the request fails"
                if failed
                else f"{pair.prefill.name} hands no KV over, so that decode computes it again",
                (f"probe: {why}",),
                _REMEDIES["refused" if failed else "no_ticket"],
                (pair.prefill.name, pair.decode.name),
            )
        )
        return
    if pair.probe is None:
        if pair.probe_error:
            outcome.unseen.append(f"a split request over {pair.name}: {pair.probe_error}")
        return
    outcome.looked_at.append(f"a request split over {pair.name}")
    if pair.probe < _LEAST_LOADED:
        outcome.findings.append(
            Finding(
                f"{pair.decode.name} computed a prompt again whose KV {pair.prefill.name} had",
                (
                    f"probe: decode loaded {pair.probe:.0%} of the prompt"
                    f" ({pair.decode.scrapes.source('prompt_loaded')})",
                ),
                _REMEDIES["not_loaded"],
                (pair.prefill.name, pair.decode.name),
                {"loaded_share": pair.probe},
            )
        )


def _computed_on_decode(worker: Worker, outcome: Outcome) -> None:
    scrapes = worker.scrapes
    names = ("prompt_computed", "prompt_cached", "prompt_loaded", "requests")
    found = [scrapes.recent(name, "requests", LEAST_REQUESTS) for name in names]
    readings = [each for each in found if each is not None]
    if len(readings) < len(names):
        outcome.unseen.append(
            f"{worker.name}: where its prompts came from (vllm:prompt_tokens_by_source_total)"
        )
        return
    computed, cached, loaded, requests = (each.value for each in readings)
    total = computed + cached + loaded
    if requests < LEAST_REQUESTS or not total:
        outcome.unseen.append(
            f"{worker.name}: {requests:.0f} requests, where {LEAST_REQUESTS} are needed"
        )
        return
    outcome.looked_at.append(f"{requests:.0f} requests of {worker.name}")
    if computed / total <= _MOST_COMPUTED or computed / requests < _LEAST_TOKENS_A_REQUEST:
        return
    outcome.findings.append(
        Finding(
            f"{worker.name} computes {computed / total:.0%} of its prompt tokens again",
            (
                f"{computed:.0f} computed, {loaded:.0f} loaded, {cached:.0f} cached of {total:.0f}"
                f" prompt tokens of {requests:.0f} requests {readings[0].when}"
                f" ({scrapes.source('prompt_computed', 'prompt_loaded')})",
            ),
            _REMEDIES["not_loaded"],
            (worker.name,),
            {"computed_share": computed / total, "prompt_tokens": total},
        )
    )


_LOST = {
    "kv_failed": ("transfers failed", "look for the first failed transfer in the decode worker's"
                  " log; `tasuki preflight --peer HOST:PORT` tests the way between the two"),
    "kv_timeouts": ("handoffs were given up because nothing arrived", "test the way between the"
                    " two: `tasuki preflight --peer HOST:PORT`"),
    "kv_expired": ("prompts' KV expired before decode read it", "find why decode does not come for"
                   " it: requests that end between the legs, or a queue on decode longer than the"
                   " lease (vLLM: kv_lease_duration, Tasuki: --lease-s)"),
    "kv_late": ("reads of KV ended after prefill had freed it: what decode read may be another"
                " prompt's", "find why decode reads so late, and let the lease last longer (vLLM:"
                " kv_lease_duration of both sides)"),
    "kv_bootstrap_failed": ("handshakes of prefill and decode failed", "open the bootstrap port"
                            " between the two (--disaggregation-bootstrap-port)"),
    "digest_mismatches": ("handoffs brought other KV than was announced", "take the pair out of"
                          " service and test memory and NICs of both machines"),
}  # fmt: skip


def lost(fleet: Fleet) -> Outcome:
    """KV that failed, timed out or expired on its way."""
    outcome = Outcome()
    for worker in fleet.workers:
        names = [name for name in _LOST if worker.scrapes.last(name) is not None]
        if not names:
            continue
        outcome.looked_at.append(worker.name)
        for name in names:
            _lost(worker, name, outcome)
    if not outcome.looked_at and fleet.of_role("prefill", "decode"):
        outcome.unseen.append("no worker shows failed or expired transfers")
    return outcome


def _lost(worker: Worker, name: str, outcome: Outcome) -> None:
    scrapes = worker.scrapes
    total, gained = scrapes.last(name) or 0.0, scrapes.gained(name) or 0.0
    of = max(scrapes.last("kv_transfers") or 0.0, scrapes.last("leases") or 0.0)
    of = of or scrapes.last("requests") or 0.0
    if not gained and total < max(1.0, _LOST_SHARE * of):
        return
    what, remedy = _LOST[name]
    outcome.findings.append(
        Finding(
            f"{worker.name}: {total:.0f} {what}",
            (
                f"{scrapes.source(name)}: {total:.0f} since its start, {gained:.0f} in"
                f" {scrapes.window_s:.0f} s, of {of:.0f}",
            ),
            remedy,
            (worker.name,),
            {name: total, "in_window": gained},
        )
    )


def stranded(fleet: Fleet) -> Outcome:
    """KV that is held although nothing runs."""
    outcome = Outcome()
    for worker in fleet.workers:
        scrapes = worker.scrapes
        used, running = scrapes.all("kv_used"), scrapes.all("running")
        if not used or not running:
            continue
        if stuck := scrapes.last("stuck_blocks"):
            outcome.findings.append(
                Finding(
                    f"{worker.name} cannot use {stuck:.0f} blocks: pulls into them do not end",
                    (f"{scrapes.source('stuck_blocks')}: {stuck:.0f}",),
                    "restart the worker when its requests have drained, and look why its peer"
                    " stopped",
                    (worker.name,),
                    {"stuck_blocks": stuck},
                )
            )
        held = min(used)
        waiting = scrapes.all("waiting")
        served = any(scrapes.gained(name) for name in _SERVED)
        if any(running) or any(waiting) or served:
            outcome.looked_at.append(f"{worker.name} (busy: only pulls that do not end)")
            continue
        if len(used) < _LEAST_SCRAPES:
            outcome.unseen.append(
                f"whether {worker.name} holds KV for nobody: its metrics were read {len(used)}"
                f" times, where {_LEAST_SCRAPES} are needed: look for longer (--window-s)"
            )
            continue
        outcome.looked_at.append(worker.name)
        if held >= _LEAST_STRANDED and not stuck:
            outcome.findings.append(
                Finding(
                    f"{worker.name} holds {held:.0%} of its KV memory for nobody",
                    (
                        f"{scrapes.source('kv_used')}: {held:.1%} at least in"
                        f" {scrapes.window_s:.0f} s in which {scrapes.source('running')} was 0",
                    ),
                    "find who prefills and never reads: requests that are dropped between prefill"
                    " and decode; a shorter lease (vLLM: kv_lease_duration, Tasuki: --lease-s)"
                    " frees it sooner",
                    (worker.name,),
                    {"kv_used_share": held},
                )
            )
    return outcome
