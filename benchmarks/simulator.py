"""How fast the simulator is, and how much of it the router's own core takes part in.

    python benchmarks/simulator.py --output benchmarks/results/simulator.json
    python benchmarks/simulator.py --trace conversation_trace.jsonl --output FILE
    python benchmarks/simulator.py --dynamo PYTHON --output FILE

Requests of 512:128 tokens, Poisson, placement and admission included, prefix index off: before 100
mixed workers, before 40 prefill and 60 decode workers, and before 10,000 mixed ones. With a trace
in Mooncake's format, its requests with their hashes before 8 mixed workers. Seconds are those of
the simulating thread, which other programs on the machine lengthen but do not count in; each
figure is the best of several runs, the others are kept. With a Python that has `ai-dynamo`, the
same cases by Dynamo's replay, which has step times of its own, with either of its routers, by turns
(`peers/dynamo_replay.py`); seconds are those of its process then.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path
from typing import Any

import psutil

from tasuki.bench.header import header, write_result

ROOT = Path(__file__).parents[1]
# Workers, requests, rate, prefill workers.
CASES = {
    "100 mixed": (100, 100_000, 3_000, 0),
    "40 prefill, 60 decode": (100, 100_000, 3_000, 40),
    "10,000 mixed": (10_000, 100_000, 300_000, 0),
}
TRACE_WORKERS = 8
DYNAMO = ROOT / "benchmarks" / "peers" / "dynamo_replay.py"
ROUTERS = ("round_robin", "kv_router")


def build() -> Path:
    """The example's program, in release."""
    command = ["cargo", "build", "--quiet", "--release", "--locked", "-p", "tasuki-sim"]
    subprocess.run([*command, "--example", "speed"], cwd=ROOT, check=True)
    told = ["cargo", "metadata", "--format-version", "1", "--no-deps"]
    metadata = subprocess.run(told, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return Path(json.loads(metadata)["target_directory"]) / "release" / "examples" / "speed"


def run(command: list[str]) -> dict[str, Any]:
    """What a program says."""
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


def compare(case: str, commands: dict[str, list[str]], repeat: int) -> list[dict[str, Any]]:
    """A row for each simulator: its best of some runs by turns, and the speeds of all."""
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in commands}
    for _ in range(repeat):
        for name, command in commands.items():
            results[name].append(run(command))
    rows = []
    for name, found in results.items():
        best = max(found, key=lambda result: float(result["requests_per_s"]))
        speeds = [result["requests_per_s"] for result in found]
        rows.append({"case": case, "simulator": name, **best, "all_requests_per_s": speeds})
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    """Run all cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--dynamo", type=Path, help="a Python that has ai-dynamo")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    program = build()
    cases = {name: list(map(str, case)) for name, case in CASES.items()}
    if options.trace:
        cases["Mooncake's conversations, 8 mixed"] = [str(TRACE_WORKERS), "1", "1", "0"]
    rows = []
    for name, words in cases.items():
        trace = [str(options.trace)] if name not in CASES else []
        commands = {"tasuki": [str(program), *words, *trace]}
        for router in ROUTERS if options.dynamo else ():
            peer = [str(options.dynamo), str(DYNAMO), *words, router, *trace]
            commands[f"Dynamo's replay, {router}"] = peer
        rows += compare(name, commands, options.repeat)
    result = header("simulator", label="simulator", topology=None, model="")
    load = dict(zip(("1_min", "5_min", "15_min"), psutil.getloadavg(), strict=True))
    write_result(options.output, {**result, "machine_load": load, "rows": rows})


if __name__ == "__main__":
    main()
