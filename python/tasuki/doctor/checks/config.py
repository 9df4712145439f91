"""Workers that should be alike and are not."""

from __future__ import annotations

from collections.abc import Sequence

from tasuki.doctor.picture import Fleet, Worker
from tasuki.doctor.result import Finding, Outcome

# What must be equal among workers of one engine and model, and why it matters.
_EQUAL = {
    "model_path": "answers depend on the worker",
    "identity": "KV moves only between equal identities (weights and dtype)",
    "dtype": "answers depend on the worker, and KV does not fit",
    "kv_dtype": "KV does not fit the other side",
    "quantization": "answers depend on the worker",
    "max_model_len": "a prompt that one takes is refused by another",
    "prefix_caching": "only some workers keep prompts",
    "vocab_size": "answers depend on the worker",
    "kv_connector": "the two sides cannot hand over",
}
# Tasuki hands over between workers of different block sizes.
_EQUAL_ENGINE = {"block_size": "KV does not fit the other side's blocks"}
_HIDDEN = {
    "vllm": {"dtype": "vLLM does not show it"},
    "tasuki": {"dtype": "give --admin HOST:PORT of the router, or the workers' addresses"},
    "sglang": {"dtype": "its /server_info does not answer"},
}


def configuration(fleet: Fleet) -> Outcome:
    """Settings that differ among workers of one model, and models that differ behind one URL."""
    outcome = Outcome()
    for workers in fleet.peers():
        if len(workers) < 2:
            continue
        equal = dict(_EQUAL)
        if workers[0].engine != "tasuki":
            equal |= _EQUAL_ENGINE
        for field, why in equal.items():
            _compare(workers, field, why, outcome)
        for field, how in _HIDDEN[workers[0].engine].items():
            _name_hidden(workers, field, how, outcome)
    _models(fleet, outcome)
    _modes(fleet, outcome)
    return outcome


def _compare(workers: Sequence[Worker], field: str, why: str, outcome: Outcome) -> None:
    values: dict[str, list[str]] = {}
    for worker in workers:
        if field in worker.config:
            values.setdefault(worker.config[field], []).append(worker.name)
    if sum(map(len, values.values())) < 2:
        return
    outcome.looked_at.append(f"{field} of {sum(map(len, values.values()))} workers")
    if len(values) > 1:
        said = tuple(f"{value}: {', '.join(names)}" for value, names in values.items())
        outcome.findings.append(
            Finding(
                f"{field} differs: {why}",
                said,
                f"start all workers of the model with the same {field}",
                tuple(name for names in values.values() for name in names),
            )
        )


def _models(fleet: Fleet, outcome: Outcome) -> None:
    """One engine's workers under several names are a fleet by mistake or on purpose."""
    halves = [w for w in fleet.workers if w.role in ("prefill", "decode") and w.model]
    for engine in sorted({worker.engine for worker in halves}):
        sides = {
            role: {w.model for w in halves if w.role == role and w.engine == engine}
            for role in ("prefill", "decode")
        }
        lonely = sides["prefill"] ^ sides["decode"]
        if lonely and all(sides.values()):
            outcome.findings.append(
                Finding(
                    f"{', '.join(sorted(lonely))} has no peer of the other role",
                    tuple(f"{w.name}: {w.role} of {w.model}" for w in halves),
                    "serve the model under one name on both sides (--served-model-name)",
                )
            )


def _modes(fleet: Fleet, outcome: Outcome) -> None:
    """Roles that the address says and the server has not."""
    for worker in fleet.workers:
        mode = worker.config.get("disaggregation_mode")
        if mode is None:
            continue
        outcome.looked_at.append(f"the role of {worker.name}")
        if worker.role and mode != worker.role and worker.role != "mixed":
            outcome.findings.append(
                Finding(
                    f"{worker.name} should be {worker.role} and was started as {mode}",
                    (f"/server_info: disaggregation_mode is {mode}",),
                    f"start it with --disaggregation-mode {worker.role}, or correct the router's"
                    " list",
                    (worker.name,),
                )
            )


def versions(fleet: Fleet) -> Outcome:
    """Workers of one engine and model must be of one version."""
    outcome = Outcome()
    for workers in fleet.peers():
        if len(workers) < 2:
            continue
        _compare(workers, "version", "the two sides may not understand each other", outcome)
        how = _HIDDEN["tasuki"]["dtype"] if workers[0].engine == "tasuki" else "it is not shown"
        _name_hidden(workers, "version", how, outcome)
    return outcome


def _name_hidden(workers: Sequence[Worker], field: str, how: str, outcome: Outcome) -> None:
    """Workers that do not show a field; `how` it can be had, unless they were asked for it."""
    hidden = [each for each in workers if field not in each.config]
    if not hidden:
        return
    asked = [each.probe_error for each in hidden if each.engine == "tasuki" and each.probe_error]
    names = ", ".join(each.name for each in hidden)
    outcome.unseen.append(f"{field} of {names}: {asked[0] if asked else how}")
