"""Are the rates that `tasuki plan` promises served for long? By step times of H200s, without a GPU.

    python benchmarks/planned_rates.py --output target/planned_rates.json

The planner is asked for three loads, two pairs of objectives and two GPUs each; the step tables are
those in the result files of `plan_regret.py`. Of each topology in its table the best design is
simulated again at its planned rate, with many times the requests of a planner's run. Where fewer
than nine tenths of the second half meet the objectives, the rate is lowered by 3% at a time.
*Served* is the share of the planned rate at which they do.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from candidates import GPU_LOADS, GPU_OBJECTIVES, TASUKI, Design, goodput, output_of, simulate
from programs import ROOT

from tasuki.bench.arguments import words
from tasuki.bench.header import header, write_result

RESULTS = ROOT / "benchmarks" / "results"
LOADS = ("w1", "chat", "answers")  # of which there are step tables
ATTAINMENT = 0.9
STEP, LEAST = 0.03, 0.7  # of the planned rate


def planned(load: str, slo: str, steps: Path) -> Iterator[dict[str, Any]]:
    """What the planner has of each topology: the design with the highest rate."""
    said = {"steps": steps, "gpus": 2, "slo": slo, "no-variations": True, **GPU_LOADS[load]}
    plan = output_of([*TASUKI, "plan", *words(said)])
    names = set()
    for found in sorted(plan["simulated"], key=lambda found: -found["rate"]):
        if found["name"] not in names and found["design"]["prefill_max_batched_tokens"] is None:
            names.add(found["name"])
            yield {**found, "itl_target_ms": plan["itl_target_ms"]}


def design_of(found: Mapping[str, Any]) -> Design:
    """The same for the simulator."""
    design = found["design"]
    counts = [design[role]["workers"] for role in ("prefill", "decode", "mixed")]
    strict, chunk = bool(design["strict_roles"]), design["max_batched_tokens"]
    return Design(*counts, 1, strict, chunk, itl_ms=found["itl_target_ms"])


def served(
    design: Design, steps: Path, load: str, rate: float, objectives: tuple[float, float], count: int
) -> float:
    """The share of a rate at which a long run meets the objectives; 0: not at `LEAST` of it."""
    share = 1.0
    while share >= LEAST:
        sent = {**GPU_LOADS[load], "request-rate": share * rate, "num-requests": count}
        run = simulate(design, steps, {**sent, "no-chunks": True})
        middle_s = run["requests"]["due_s"][count // 2]
        if goodput(run, *objectives, middle_s)[1] >= ATTAINMENT:
            return round(share, 2)
        share -= STEP
    return 0.0


def main() -> None:
    """Plan, simulate, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=60_000, help="of a long run")
    parser.add_argument("--output", type=Path, default=RESULTS / "planned_rates.json")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for load in LOADS:
            measured = json.loads((RESULTS / f"plan_regret_2xh200_{load}.json").read_text())
            steps = Path(folder) / f"{load}.json"
            steps.write_text(json.dumps(measured["steps"]))
            for name, (ttft_s, tpot_s) in GPU_OBJECTIVES.items():
                slo = f"ttft={ttft_s:g}s,tpot={1e3 * tpot_s:g}ms"
                for found in planned(load, slo, steps):
                    design, rate = design_of(found), float(found["rate"])
                    share = served(design, steps, load, rate, (ttft_s, tpot_s), options.requests)
                    about = {"load": load, "objectives": name, "design": found["name"]}
                    rows.append({**about, "rate": rate, "served": share})
                    print(json.dumps(rows[-1]), flush=True)
    result = header("planned_rates", label="plan", topology=None, model="qwen3-4b-shape")
    write_result(options.output, {**result, "requests": options.requests, "rows": rows})


if __name__ == "__main__":
    main()
