"""How far the simulator is off, against measured runs that were not used to fit it.

    python benchmarks/simulator_accuracy.py

Needs no GPU: W1, W2 and their mixture as they were measured on two H200s with every way of naming
the roles (`role_names.json`, the same requests), and W1 and W2 split strictly
(`serve_split_strict.json`, other requests of the same lengths). They are simulated from step times
of the same shape that other programs measured alone (`gpu_steps.json`, `gpu_mixed_steps.json`,
fitted by `overload.py`).
`simulator_accuracy_cpu.py` does both on the machine where it runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from overload import fit
from programs import ROOT

sys.path.append(str(Path(__file__).with_name("gpu")))
import role_names
from w1_w2 import WORKLOADS, Workload

from tasuki.bench.arguments import words
from tasuki.bench.header import header, write_result

Pair = tuple[Mapping[str, Any], Mapping[str, float]]
"""A run's figures, and the simulated ones."""

TASUKI = (sys.executable, "-m", "tasuki")
RESULTS = ROOT / "benchmarks" / "results"
NAMED, STRICT = "role_names.json", "serve_split_strict.json"
SPLIT: dict[str, Any] = {"prefill": 1, "decode": 1, "strict-roles": True}
KV_BYTES_PER_TOKEN = 147_456  # Qwen3-4B's shape in bfloat16
BLOCKS = 25_000  # of 32 tokens, beside its weights on an H200
METRICS = {
    "output_throughput": ("output_throughput", None),
    "ttft_mean_ms": ("ttft_ms", "mean"),
    "ttft_p50_ms": ("ttft_ms", "median"),
    "ttft_p95_ms": ("ttft_ms", "p95"),
    "ttft_p99_ms": ("ttft_ms", "p99"),
    "tpot_mean_ms": ("tpot_ms", "mean"),
    "itl_p99_ms": ("itl_ms", "p99"),
    "e2e_mean_ms": ("e2e_ms", "mean"),
}


def simulate(options: Mapping[str, Any], load: Mapping[str, Any]) -> dict[str, Any]:
    """One run of `tasuki simulate`; its metrics."""
    command = [*TASUKI, "simulate", "--json", *words({**options, **load})]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout)["metrics"])


def picked(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The metrics that are compared."""
    found = {}
    for name, (field, part) in METRICS.items():
        value = metrics.get(field)
        if value is not None:
            found[name] = float(value[part] if part else value)
    return found


def errors(measured: Mapping[str, float], simulated: Mapping[str, float]) -> dict[str, float]:
    """Relative, of the metrics that both have."""
    both = measured.keys() & simulated.keys()
    return {name: simulated[name] / measured[name] - 1 for name in METRICS if name in both}


def h200_rates() -> str:
    """Steps of Qwen3-4B's shape, for `--rates`."""
    steps = fit()
    parts = {
        "step-ms": steps["step"],
        "sequence-us": 1e3 * steps["sequence"],
        "kv-token-ns": 1e6 * steps["kv_token"],
        "prompt-token-us": 1e3 * steps["token"],
        "prompt-square-ns": 1e6 * steps["square"],
    }
    return ",".join(f"{name}={max(value, 0.0):.6g}" for name, value in parts.items())


class OnH200s:
    """Two workers of Qwen3-4B's shape, simulated as they were measured."""

    def __init__(self) -> None:
        self._rates = h200_rates()

    def rows(self) -> Iterator[dict[str, Any]]:
        """Every way of naming the roles and every load, then the strict split."""
        with tempfile.TemporaryDirectory() as folder:
            yield from self._named(Path(folder))
        runs = json.loads((RESULTS / STRICT).read_text())["runs"]
        for name, workload in WORKLOADS.items():
            found = [r for r in runs if (r["topology"], r["workload"]) == ("1p1d", name)]
            pairs = [(run, self._simulated(SPLIT, workload, 0)) for run in found]
            yield row(STRICT, "1p1d strict", name, pairs)

    def _named(self, folder: Path) -> Iterator[dict[str, Any]]:
        result = json.loads((RESULTS / NAMED).read_text())
        loads = role_names.workloads(
            role_names.arguments().parse_args(result["command"][2:]), folder
        )
        by_name: dict[tuple[str, str], list[Pair]] = {}
        for seed, run in enumerate(result["runs"], 1):  # as they were drawn
            load, naming = run["workload"], run["naming"]
            roles = role_names.NAMES[naming]
            shape = {role: roles.count(role) for role in ("prefill", "decode", "mixed")}
            pair = (run, self._simulated(shape, loads[load], seed))
            by_name.setdefault((naming, load), []).append(pair)
        for (naming, load), pairs in by_name.items():
            yield row(NAMED, naming, load, pairs)

    def _simulated(self, shape: Mapping[str, Any], load: Workload, seed: int) -> dict[str, float]:
        options = {
            **shape,
            "rates": self._rates,
            "kv-bytes-per-token": KV_BYTES_PER_TOKEN,
            "num-blocks": BLOCKS,
            "max-model-len": 16_384,
            "num-requests": load.requests,
            "max-concurrency": load.at_a_time,
            "seed": seed,
        }
        said = zip(*[iter(w.removeprefix("--") for w in load.options)] * 2, strict=True)
        return picked(simulate(options, dict(said)))


def row(file: str, topology: str, load: str, pairs: Sequence[Pair]) -> dict[str, Any]:
    """Medians over the runs, measured and simulated, and how far they are apart."""
    both = [metric for metric in METRICS if metric in pairs[0][0] and metric in pairs[0][1]]
    measured, simulated = (
        {metric: statistics.median(pair[side][metric] for pair in pairs) for metric in both}
        for side in (0, 1)
    )
    return {
        "measured_in": file,
        "runs": len(pairs),
        "topology": topology,
        "load": load,
        "measured": measured,
        "simulated": simulated,
        "error": errors(measured, simulated),
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Median and worst error of each metric over all rows."""
    result = {}
    for metric in METRICS:
        off = [abs(row["error"][metric]) for row in rows if metric in row["error"]]
        if off:
            result[metric] = {"median": statistics.median(off), "worst": max(off)}
    return result


def write(kind: str, model: str, output: Path, found: Iterable[dict[str, Any]]) -> None:
    """Print the rows as they come, and write the result."""
    rows = []
    for each in found:
        rows.append(each)
        told = {name: f"{100 * error:+.0f}%" for name, error in each["error"].items()}
        print(each["topology"], each["load"], told, flush=True)
    result = header(kind, label="accuracy", topology=None, model=model)
    load = dict(zip(("1_min", "5_min", "15_min"), psutil.getloadavg(), strict=True))
    write_result(output, {**result, "machine_load": load, "rows": rows, "summary": summary(rows)})


def main() -> None:
    """Simulate what was measured, and say how far off it is."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=RESULTS / "simulator_accuracy.json")
    options = parser.parse_args()
    write("simulator_accuracy", "qwen3-4b-shape", options.output, OnH200s().rows())


if __name__ == "__main__":
    main()
