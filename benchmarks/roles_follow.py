"""Roles that follow the load, against every static topology and deciders by thresholds, simulated.

    python benchmarks/roles_follow.py --trace TRACE --output benchmarks/results/roles_follow.json

Steps are those of Qwen3-4B's shape on an H200, as other programs measured them (`overload.py`).
W1, W2, their mixture, a load that swings between them, and bursts, before 2, 16 and 256
workers with strict roles. `--trace`: also a trace in Mooncake's format before 2 and 16 workers, so
much faster or slower that TRACE_RATE requests a second come for each worker; what its prompts have
in common is left out. A request is good if its first token comes within 2 s and the mean time per
token after it is 8 ms at most: with these objectives two workers serve W1 best as two mixed ones
and W2 best as prefill and decode. Goodput counts good requests by when they were due. The
deciders:

    round robin     all workers mixed, one after another
    load loop       as Dynamo's planner moves workers between pools: by thresholds of the
                    objectives, every 5 s, one worker at a time; it begins with the middle split
    prompt 4096     as Dynamo's conditional disaggregation: prompts of 4,096 tokens and more are
                    split, others are served whole by decode workers; on the middle split
    prompt 16       as llm-d's decider with its simulator's default: the same from 16 tokens on
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
from overload import fit
from programs import ROOT

from tasuki.bench.header import header, write_result

TTFT_S, TPOT_S = 2.0, 0.008
W1 = {"input": [5, 1019], "output": [5, 1019]}
W2 = {"input": [5000, 5000], "output": [250, 250]}
KINDS = {
    "w1": [{"weight": 1, **W1}],
    "w2": [{"weight": 1, **W2}],
    "mixture": [{"weight": 3, **W1}, {"weight": 1, **W2}],
}
# Requests a second for each worker.
RATES = {"w1": 21.0, "w2": 6.5, "mixture": 10.0}
SWING = (("w1", 1.0), ("w2", 1.0), ("mixture", 1.0), ("w1", 0.6), ("w2", 0.8))
BURSTS = (("w1", 0.5), ("w2", 1.3), ("w1", 1.3), ("w2", 0.4))
# The same of a trace: with these many prompts are long.
TRACE_RATE = 1.6
TRACE_WORKERS = (2, 16)
PHASE_S = {2: 120.0, 16: 120.0, 256: 40.0}
SEED = 11


def phases(load: str, workers: int) -> list[dict[str, Any]]:
    """What is sent, in phases."""
    seconds = PHASE_S[workers]
    if load == "swinging":
        parts = [(kind, part, seconds) for kind, part in SWING]
    elif load == "bursts":
        count = 8 if workers < 256 else 3
        parts = [(kind, part, 8.0) for kind, part in BURSTS * count]
    else:
        parts = [(load, 1.0, seconds / 2)]
    return [
        {"seconds": s, "rate": RATES[kind] * part * workers, "kinds": KINDS[kind]}
        for kind, part, s in parts
    ]


def read_trace(path: Path, workers: int) -> list[tuple[float, int, int]]:
    """Requests of a trace: when each is due, in seconds, its prompt's and its answer's tokens."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    span_s = (lines[-1]["timestamp"] - lines[0]["timestamp"]) / 1e3
    speed = TRACE_RATE * workers / (len(lines) / span_s)
    return [
        (line["timestamp"] / 1e3 / speed, line["input_length"], max(line["output_length"], 1))
        for line in lines
    ]


def topologies(workers: int) -> dict[str, tuple[int, int, int]]:
    """Static ones: prefill, decode, mixed."""
    if workers == 2:
        return {"2 mixed": (0, 0, 2), "1p 1d": (1, 1, 0), "1d 1m": (0, 1, 1), "1p 1m": (1, 0, 1)}
    eighth = workers // 8
    found = {f"{workers} mixed": (0, 0, workers)}
    for eighths in (1, 2, 3, 4, 5) if workers == 16 else (1, 2, 3, 4):
        prefill = eighths * eighth
        found[f"{prefill}p {workers - prefill}d"] = (prefill, workers - prefill, 0)
    quarter = workers // 4
    found[f"{quarter}p {quarter}d {2 * quarter}m"] = (quarter, quarter, 2 * quarter)
    return found


def cases(workers: int, load: str) -> Iterator[dict[str, Any]]:
    """Every run of one load: static ones first."""
    static = topologies(workers)

    def case(name: str, shape: tuple[int, int, int], **said: Any) -> dict[str, Any]:
        sizes = dict(zip(("prefill", "decode", "mixed"), shape, strict=True))
        usual = {"strict": True, "policy": "cost", "roles": "fixed", "timeline": False}
        return {"name": name, **sizes, **usual, **said}

    for name, shape in static.items():
        yield case(name, shape)
    mixed = static[f"{workers} mixed"]
    middle = (
        (workers // 2, workers // 2, 0) if workers == 2 else (3 * workers // 8, 5 * workers // 8, 0)
    )
    yield case("round robin", mixed, policy="round-robin")
    yield case("load loop", middle, roles="thresholds")
    yield case("prompt 4096", middle, policy="4096")
    yield case("prompt 16", middle, policy="16")
    timeline = workers == 16 and load == "swinging"
    yield case("follow, from mixed", mixed, roles="follow", timeline=timeline)
    yield case("follow, from split", middle, roles="follow", timeline=timeline)


def build() -> Path:
    """The example's program, in release."""
    command = ["cargo", "build", "--quiet", "--release", "--locked", "-p", "tasuki-sim"]
    subprocess.run([*command, "--example", "roles"], cwd=ROOT, check=True)
    told = ["cargo", "metadata", "--format-version", "1", "--no-deps"]
    metadata = subprocess.run(told, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return Path(json.loads(metadata)["target_directory"]) / "release" / "examples" / "roles"


def scenario(workers: int, load: str, trace: Path | None = None) -> dict[str, Any]:
    """What the program reads; `trace`: of the load of that name."""
    requests = read_trace(trace, workers) if trace and load == "trace" else []
    if requests:
        seconds = requests[-1][0]
        sent = [{"seconds": seconds, "rate": len(requests) / seconds, "kinds": []}]
    else:
        sent = phases(load, workers)
    steps = {name: value * 1e-3 for name, value in fit().items()}
    return {
        "rates": {
            "step": steps["step"],
            "sequence": max(steps["sequence"], 0.0),
            "kv_token": max(steps["kv_token"], 0.0),
            "prompt_step": steps["step"],  # the weights are read
            "prompt_token": steps["token"],
            "prompt_square": max(steps["square"], 0.0),
        },
        "kv_bytes_per_token": 147_456,
        "num_blocks": 25_000,
        "max_model_len": 131_072 if requests else 16_384,
        "ttft_s": TTFT_S,
        "tpot_s": TPOT_S,
        "seed": SEED,
        "part_s": 2.0,
        "phases": sent,
        "requests": requests,
        "runs": list(cases(workers, load)),
    }


def compared(runs: list[dict[str, Any]], static: int) -> dict[str, Any]:
    """Following roles against the static topologies, which come first."""
    fixed, follow = runs[:static], [run for run in runs if run["name"].startswith("follow")]
    best = [
        max(run["phases"][i]["goodput"] for run in fixed) for i in range(len(runs[0]["phases"]))
    ]
    single = max(fixed, key=lambda run: float(run["goodput"]))
    worst = [
        min(run["phases"][i]["goodput"] / most for run in follow) for i, most in enumerate(best)
    ]
    whole = min(run["goodput"] for run in follow)
    return {
        "best_static": single["name"],
        "best_static_goodput": single["goodput"],
        "follow_goodput": whole,
        "of_best_static": whole / single["goodput"],
        "of_best_in_phase": worst,
    }


def row(program: Path, workers: int, load: str, trace: Path | None) -> dict[str, Any]:
    """Every run of one load before so many workers."""
    given = scenario(workers, load, trace)
    done = subprocess.run(
        [str(program)], input=json.dumps(given), check=True, capture_output=True, text=True
    )
    runs = [json.loads(line) for line in done.stdout.splitlines()]
    found = compared(runs, len(topologies(workers)))
    sent = [{"seconds": phase["seconds"], "rate": phase["rate"]} for phase in given["phases"]]
    whole, phase = found["of_best_static"], min(found["of_best_in_phase"])
    print(f"{workers:4} {load:9} {whole:.3f} of the best static, {phase:.3f}", flush=True)
    return {"workers": workers, "load": load, "phases": sent, "runs": runs, **found}


def main() -> None:
    """Simulate all of it, two loads at a time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=list(PHASE_S))
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    program = build()
    loads = ["w1", "w2", "mixture", "swinging", "bursts"]
    wanted = [(workers, load) for workers in options.workers for load in loads]
    if options.trace:
        wanted += [(count, "trace") for count in options.workers if count in TRACE_WORKERS]
    with ThreadPoolExecutor(max_workers=2) as pool:
        jobs = [pool.submit(row, program, *one, options.trace) for one in wanted]
        rows = sorted((job.result() for job in jobs), key=lambda done: int(done["workers"]))
    result = header("roles_follow", label="roles", topology=None, model="qwen3-4b-shape")
    machine_load = dict(zip(("1_min", "5_min", "15_min"), psutil.getloadavg(), strict=True))
    slo = {"ttft_s": TTFT_S, "tpot_s": TPOT_S}
    write_result(options.output, {**result, "machine_load": machine_load, "slo": slo, "rows": rows})


if __name__ == "__main__":
    main()
