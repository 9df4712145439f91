"""Roles that follow the load before two workers of other paces than an H200's, simulated.

    python benchmarks/roles_paces.py --output benchmarks/results/roles_paces.json

The scenario is that of `roles_follow.py`. Decode steps take 1.2 to 1.5 times as long, and reads of
KV 1.2 to 2 times: from an H200 to an H100 and beyond. Prompts take as long as on an H200, because
an H100 computes as fast, or as many times as long as steps. W1, W2 and their mixture for a minute
each, at all and at three quarters of the rates of `roles_follow.py`, so most of these are beyond
what the workers can serve. Following roles begin as two mixed workers and as a split; the lower
goodput counts, against the best of the four static topologies.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from itertools import product
from pathlib import Path
from typing import Any

from roles_follow import RATES, TPOT_S, TTFT_S, build, compared, scenario, topologies

from tasuki.bench.header import header, write_result

WORKERS = 2
# Of an H200's: decode steps, reads of KV.
PACES = ((1.2, 1.2), (1.2, 1.6), (1.2, 2.0), (1.35, 1.6), (1.5, 1.2), (1.5, 2.0))
SHARES = (1.0, 0.75)
SEEDS = (41, 42, 43)


def given(load: str, pace: tuple[float, float, float], share: float, seed: int) -> dict[str, Any]:
    """The scenario of a load at a share of its rate; `pace`: of steps, KV reads and prompts."""
    made = scenario(WORKERS, load)
    step, kv_token, prompt = pace
    factors = {"step": step, "sequence": step, "prompt_step": step, "kv_token": kv_token}
    rates = {name: factors.get(name, prompt) * value for name, value in made["rates"].items()}
    phases = [{**phase, "rate": phase["rate"] * share} for phase in made["phases"]]
    follows = (run for run in made["runs"] if run["name"].startswith("follow"))
    runs = [*made["runs"][: len(topologies(WORKERS))], *follows]
    return {**made, "rates": rates, "phases": phases, "runs": runs, "seed": seed}


def row(program: Path, load: str, pace: tuple[float, float, float]) -> dict[str, Any]:
    """A load before workers of one pace: a case for each rate and seed."""
    cases = []
    for share, seed in product(SHARES, SEEDS):
        asked = json.dumps(given(load, pace, share, seed))
        done = subprocess.run(
            [str(program)], input=asked, check=True, capture_output=True, text=True
        )
        runs = [json.loads(line) for line in done.stdout.splitlines()]
        static = {run["name"]: run["goodput"] for run in runs[: len(topologies(WORKERS))]}
        found = compared(runs, len(static))
        del found["of_best_in_phase"]  # one phase
        cases.append({"share": share, "seed": seed, "static": static, **found})
    of_best = [case["of_best_static"] for case in cases]
    print(load, pace, " ".join(f"{value:.3f}" for value in of_best), flush=True)
    names = ("steps", "kv_reads", "prompts")
    return {"load": load, **dict(zip(names, pace, strict=True)), "cases": cases}


def main() -> None:
    """Simulate all of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    program = build()
    paces = [(step, kv, prompt) for step, kv in PACES for prompt in (1.0, step)]
    rows = [row(program, load, pace) for pace in paces for load in RATES]
    result = header("roles_paces", label="roles", topology=None, model="qwen3-4b-shape")
    slo = {"ttft_s": TTFT_S, "tpot_s": TPOT_S}
    write_result(options.output, {**result, "slo": slo, "rows": rows})


if __name__ == "__main__":
    main()
