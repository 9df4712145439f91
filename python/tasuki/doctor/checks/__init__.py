"""All checks, in the order of the report. Each is a pure function of the picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tasuki.doctor.checks import cache, config, handoff, health, link, ratio, speed
from tasuki.doctor.picture import Fleet
from tasuki.doctor.result import Outcome

Check = Callable[[Fleet], Outcome]

CHECKS: Mapping[str, Check] = {
    "workers": health.workers,
    "errors": health.errors,
    "configuration": config.configuration,
    "versions": config.versions,
    "recomputed prompts": handoff.recomputed,
    "lost KV": handoff.lost,
    "stranded KV": handoff.stranded,
    "KV transport": link.transport,
    "KV layout": link.layout,
    "slow worker": speed.slow_worker,
    "prefix cache": cache.routing,
    "ratio": ratio.ratio,
    "preemptions": health.preemptions,
    "KV memory": health.full_memory,
}
