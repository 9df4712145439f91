"""Which workers `tasuki serve` starts on several GPUs where no role is given: the planner's choice.

What is known is little: the GPUs, the model, the objectives, and the request log of an earlier run
if there is one. Step times are from data sheets. So the answer is the default (a mixed worker for
each GPU) unless another topology serves clearly more, or the model needs several GPUs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tasuki import _native
from tasuki.launch.config import MAX_WORKERS, Topology, step_target_ms
from tasuki.launch.gpus import Gpu
from tasuki.launch.router_options import RouterOptions
from tasuki.worker.config import ROLES, WorkerConfig

TTFT_MS, TPOT_MS = 2000.0, 50.0
"""Objectives where the router is given none."""
LENGTHS = "2000:200"
"""Tokens of prompt and answer where no log tells."""
_STAGED_GB_S = 10.0  # between GPUs that cannot read one another
_MOST_LOG_BYTES = 4 << 20  # a longer log is not read at a start
# Of a worker, as both commands have them.
_LIMITS = ("block_size", "max_model_len", "max_batched_tokens", "max_running_requests")


@dataclass(frozen=True, slots=True)
class Planned:
    """What the planner says.

    Attributes:
        topology: The workers; None: there is no plan, and the default counts.
        ranks: GPUs of one worker, by role.
        strict_roles: Whether workers are to do nothing but what their roles say.
        line: What was chosen and why, or why nothing was.
        table: As `tasuki plan` prints it; empty without a plan.
    """

    topology: Topology | None
    ranks: dict[str, int]
    strict_roles: bool
    line: str
    table: str = ""


def plan_gpus(
    gpus: Sequence[Gpu],
    model: Path,
    worker: WorkerConfig,
    router: RouterOptions,
    peer_access: bool = True,
) -> Planned:
    """Divide GPUs among workers.

    Args:
        gpus: Those that are to serve, two or more.
        model: Its folder.
        worker: How long a step that decodes may take with prompts in it, and the limits of workers.
        router: Objectives, the request log, and whether roles have to be strict.
        peer_access: Whether every GPU can read the memory of every other one.
    """
    kinds = {gpu.name for gpu in gpus}
    if len(kinds) != 1:
        return _none("GPUs are of several kinds" if kinds else "the driver describes no GPU")
    words = ["--quick", "--gpus", str(len(gpus)), "--gpu", gpus[0].name, "--model", str(model)]
    words += ["--gpu-memory-gb", f"{min(gpu.memory_bytes for gpu in gpus) / 1e9:.3f}"]
    ttft_ms, tpot_ms = router.ttft_target_ms or TTFT_MS, router.tpot_target_ms or TPOT_MS
    words += ["--slo", f"ttft={ttft_ms:g}ms,tpot={tpot_ms:g}ms"]
    target_ms = step_target_ms(worker, router)
    target_s = replace(worker, itl_target_ms=target_ms).itl_target_s(on_cuda=True)
    words += ["--itl-target-ms", f"{1e3 * (target_s or 0.0):g}"]
    for limit in _LIMITS:
        if (value := getattr(worker, limit)) is not None:
            words += [f"--{limit.replace('_', '-')}", str(value)]
    if router.strict_roles:
        words.append("--strict-roles")
    if not peer_access:
        words += ["--link-gb-s", f"{_STAGED_GB_S:g}"]
    log = router.request_log
    if log is not None and log.is_file() and 0 < log.stat().st_size <= _MOST_LOG_BYTES:
        load, words = f"the load of {log}", [*words, "--from", str(log)]
    else:
        load, words = f"prompts and answers of {LENGTHS} tokens", [*words, "--lengths", LENGTHS]
    try:
        text, table = _native.plan_quietly(words)
    except ValueError as error:
        return _none(" ".join(str(error).split()))
    plan = json.loads(text)
    asked = f"{load}, TTFT {ttft_ms:g} ms and TPOT {tpot_ms:g} ms, by data sheets"
    return _read(plan, asked, table)


def _read(plan: dict[str, Any], asked: str, table: str) -> Planned:
    best = plan["best"]
    design = best["design"]
    counts = {role: int(design[role]["workers"]) for role in ROLES}
    if best["rate"] <= 0.0 or sum(counts.values()) > MAX_WORKERS:
        return _none(f"no topology serves {asked}", table)
    ranks = {role: int(design[role]["tensor_parallel"]) for role in ROLES if counts[role]}
    others = [found for found in plan["simulated"] if found["name"] != best["name"]]
    beside = ""
    if others:
        other = f"{others[0]['name']} with {_rate(others[0]['rate'])}"
        equal = others[0]["rate"] >= best["rate"]
        beside = f"; {other} is equal as far as runs tell" if equal else f"; next is {other}"
    rate = f"{'at least ' if best['at_least'] else ''}{_rate(best['rate'])} requests/s"
    line = (
        f"{best['name']}: no roles are given; planned for {asked}: {rate}"
        f"{beside} (--explain shows all; --prefill, --decode and --mixed choose)"
    )
    topology = Topology(counts["prefill"], counts["decode"], counts["mixed"])
    return Planned(topology, ranks, bool(design["strict_roles"]), line, table)


def _rate(per_second: float) -> str:
    """Three digits that count, as `tasuki plan` prints them, or the whole number."""
    if per_second <= 0.0:
        return "0"
    return f"{per_second:.{max(0, 2 - math.floor(math.log10(per_second)))}f}"


def _none(why: str, table: str = "") -> Planned:
    return Planned(None, {}, False, f"not planned: {why}", table)
