"""What was found, as text and as JSON."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from dataclasses import asdict

from tasuki.doctor.look import Look
from tasuki.doctor.picture import Fleet, Worker
from tasuki.doctor.result import COULD_NOT_LOOK, FOUND, HEALTHY, Finding, Outcome

_WIDTH = 100
SCHEMA = "tasuki.doctor/1"


def exit_code(outcomes: Mapping[str, Outcome]) -> int:
    """0: nothing is wrong with what was looked at; 1: something is; 2: no check saw anything."""
    if any(outcome.findings for outcome in outcomes.values()):
        return FOUND
    return HEALTHY if any(outcome.looked_at for outcome in outcomes.values()) else COULD_NOT_LOOK


def as_text(look: Look, outcomes: Mapping[str, Outcome]) -> str:
    """Who is there, what is wrong, what was looked at and what was not."""
    lines = [_worker(each) for each in look.fleet.workers]
    lines += [f"{each.engine:<7} router   {each.name}" for each in look.fleet.routers]
    findings = [(name, each) for name, one in outcomes.items() for each in one.findings]
    lines.append("")
    for number, (name, finding) in enumerate(findings, 1):
        lines += [*_finding(number, name, finding), ""]
    for name, outcome in outcomes.items():
        if outcome.looked_at and not outcome.findings:
            lines += _wrapped(f"ok    {name}: ", _shortened(outcome.looked_at))
    for name, outcome in outcomes.items():
        for why in outcome.unseen:
            lines += _wrapped(f"not looked at: {name}: ", why)
    lines += ["", _summary(look, len(findings))]
    return "\n".join(lines)


def _worker(worker: Worker) -> str:
    config = worker.config
    parts = [worker.model, config.get("version", ""), config.get("dtype", "")]
    running = worker.scrapes.mean("running")
    if running is not None:
        parts.append(f"{running:.1f} running")
    if (used := worker.scrapes.mean("kv_used")) is not None:
        parts.append(f"KV {used:.0%} in use")
    about = ", ".join(part for part in parts if part)
    return f"{worker.engine:<7} {worker.role or '-':<8} {worker.name}: {about}"


def _finding(number: int, name: str, finding: Finding) -> list[str]:
    lines = _wrapped(f"{number}. {name}: ", f"{finding.what}.")
    for each in finding.evidence:
        lines += _wrapped("   evidence: ", each)
    return [*lines, *_wrapped("   remedy:   ", finding.remedy)]


def _wrapped(head: str, text: str) -> list[str]:
    indent = " " * min(len(head), 14)
    return textwrap.wrap(
        head + text,
        _WIDTH,
        subsequent_indent=indent,
        break_on_hyphens=False,
        break_long_words=False,
    )


def _shortened(texts: list[str]) -> str:
    shown = list(dict.fromkeys(texts))
    more = f" and {len(shown) - 6} more" if len(shown) > 6 else ""
    return ", ".join(shown[:6]) + more


def _summary(look: Look, findings: int) -> str:
    fleet = look.fleet
    probes = sum(len(each.probes) for each in fleet.workers)
    probes += sum(len(each.repeats) for each in fleet.routers)
    seen = (
        f"{_count(len(fleet.workers), 'worker')}, {look.settings.window_s:.0f} s, {probes} probes"
    )
    return f"{_count(findings, 'finding')} ({seen})"


def _count(number: int, what: str) -> str:
    return f"{number or 'no'} {what}{'' if number == 1 else 's'}"


def as_json(look: Look, outcomes: Mapping[str, Outcome]) -> str:
    """The same for programs, with the values of the first and the last scrape."""
    return json.dumps(
        {
            "schema": SCHEMA,
            "window_s": look.settings.window_s,
            "findings": [
                {"check": name, **asdict(finding)}
                for name, outcome in outcomes.items()
                for finding in outcome.findings
            ],
            "checks": {
                name: {"looked_at": outcome.looked_at, "not_looked_at": outcome.unseen}
                for name, outcome in outcomes.items()
            },
            "silent": look.fleet.silent,
            "fleet": _fleet(look.fleet),
        },
        indent=1,
    )


def _fleet(fleet: Fleet) -> dict[str, object]:
    return {
        "workers": [
            {
                "name": worker.name,
                "engine": worker.engine,
                "role": worker.role,
                "model": worker.model,
                "config": worker.config,
                "first": dict(worker.scrapes.values[0]) if worker.scrapes.values else {},
                "last": dict(worker.scrapes.values[-1]) if worker.scrapes.values else {},
                "sources": worker.scrapes.sources,
                "probes": [asdict(probe) for probe in worker.probes],
                "probe_error": worker.probe_error,
            }
            for worker in fleet.workers
        ],
        "pairs": [
            {
                "prefill": pair.prefill.name,
                "decode": pair.decode.name,
                "transport": pair.transport,
                "last": dict(pair.scrapes.values[-1]) if pair.scrapes.values else {},
                "failures": pair.failures,
                "probe_loaded_share": pair.probe,
                "probe_error": pair.probe_error,
                "probe_fault": pair.probe_fault,
            }
            for pair in fleet.pairs
        ],
        "routers": [
            {"name": router.name, "engine": router.engine, "repeats": router.repeats}
            for router in fleet.routers
        ],
    }
