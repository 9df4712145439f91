"""How fast the simulator is, and how much of it the router's own core takes part in.

    python benchmarks/simulator.py --output benchmarks/results/simulator.json
    python benchmarks/simulator.py --trace conversation_trace.jsonl --output FILE

Requests of 512:128 tokens, Poisson, placement and admission included, prefix index off: before 100
mixed workers, before 40 prefill and 60 decode workers, and before 10,000 mixed ones. With a trace
in Mooncake's format, its requests with their hashes before 8 mixed workers. Seconds are those of
the simulating thread, which other programs on the machine lengthen but do not count in; each figure
is the best of several runs, the others are kept.
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


def build() -> Path:
    """The example's program, in release."""
    command = ["cargo", "build", "--quiet", "--release", "--locked", "-p", "tasuki-sim"]
    subprocess.run([*command, "--example", "speed"], cwd=ROOT, check=True)
    told = ["cargo", "metadata", "--format-version", "1", "--no-deps"]
    metadata = subprocess.run(told, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return Path(json.loads(metadata)["target_directory"]) / "release" / "examples" / "speed"


def runs(program: Path, arguments: list[str], repeat: int) -> list[dict[str, Any]]:
    """What the program says, several times."""
    results = []
    for _ in range(repeat):
        command = [str(program), *arguments]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        results.append(json.loads(done.stdout))
    return results


def row(name: str, results: list[dict[str, Any]]) -> dict[str, Any]:
    """The best run, and the speeds of all."""
    best = max(results, key=lambda result: float(result["requests_per_s"]))
    speeds = [result["requests_per_s"] for result in results]
    return {"case": name, **best, "all_requests_per_s": speeds}


def main() -> None:
    """Run all cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    program = build()
    rows = []
    for name, case in CASES.items():
        rows.append(row(name, runs(program, list(map(str, case)), options.repeat)))
        print(rows[-1], flush=True)
    if options.trace:
        arguments = [str(TRACE_WORKERS), "1", "1", "0", str(options.trace)]
        rows.append(row("Mooncake's conversations, 8 mixed", runs(program, arguments, 3)))
        print(rows[-1], flush=True)
    result = header("simulator", label="simulator", topology=None, model="")
    load = dict(zip(("1_min", "5_min", "15_min"), psutil.getloadavg(), strict=True))
    write_result(options.output, {**result, "machine_load": load, "rows": rows})


if __name__ == "__main__":
    main()
