"""How far the simulator is off, against measured runs that were not used to fit it.

    python benchmarks/simulator_accuracy.py --output benchmarks/results/simulator_accuracy.json
    python benchmarks/simulator_accuracy.py --cpu --output FILE       measures on this machine first

The first form needs no GPU: W1, W2 and their mixture as they were measured on two H200s with
every way of naming the roles (`role_names.json`), and W1 and W2 split strictly
(`serve_split_strict.json`). They are simulated with the same requests, from step times of the same
shape that other programs measured alone (`gpu_steps.json`, `gpu_mixed_steps.json`, fitted by
`overload.py`).
The second measures the step table of a model on the CPU, then serves with it at a few rates, and
simulates these from the table.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
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
from tasuki.bench.serving import Serving
from tasuki.launch.config import Topology

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
CPU_RATES = (0.5, 1.0)
CPU_LOAD = {"input-tokens": 200, "output-tokens": 40, "range-ratio": 0.5, "temperature": 0}
CPU_TOPOLOGIES = {"1mixed": {"mixed": 1}, "1p1d": SPLIT}
CPU_GRID = {
    "prefill-tokens": "16,64,256,512",
    "prefill-context": "0,512",
    "decode-batch": "1,2,4,8,16",
    "decode-context": "128,512",
    "transfer-blocks": "1,16,64",
    "repeat": 3,
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


def on_cpu(model: str, requests: int) -> Iterator[dict[str, Any]]:
    """A step table, then served and simulated at a few rates."""
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "steps.json"
        command = [*TASUKI, "bench", "batch", "--steps", "--model", model, "--output", str(table)]
        subprocess.run([*command, *words(CPU_GRID)], check=True)
        for topology, shape in CPU_TOPOLOGIES.items():
            roles = [shape.get(role, 0) for role in ("prefill", "decode", "mixed")]
            strict = {"strict-roles": True} if "strict-roles" in shape else {}
            server = Serving(Topology(*roles), {"model": model, **strict}, Path(folder) / "log")
            try:
                for rate in CPU_RATES:
                    load = {**CPU_LOAD, "request-rate": rate, "num-requests": requests}
                    output = Path(folder) / "result.json"
                    command = [*TASUKI, "bench", "serve", "--base-url", server.url, "--quiet"]
                    command += ["--output", str(output), *words(load)]
                    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
                    measured = picked(json.loads(output.read_text())["metrics"])
                    options = {**shape, "steps": table}
                    del load["temperature"]
                    simulated = picked(simulate(options, load))
                    yield {
                        "topology": topology,
                        "load": f"{rate} requests/s",
                        "measured": measured,
                        "simulated": simulated,
                        "error": errors(measured, simulated),
                    }
            finally:
                server.stop()


def summary(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Median and worst error of each metric over all rows."""
    result = {}
    for metric in METRICS:
        off = [abs(row["error"][metric]) for row in rows if metric in row["error"]]
        if off:
            result[metric] = {"median": statistics.median(off), "worst": max(off)}
    return result


def main() -> None:
    """Simulate what was measured, and say how far off it is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    rows = []
    for row in on_cpu(options.model, options.requests) if options.cpu else OnH200s().rows():
        rows.append(row)
        told = {name: f"{100 * error:+.0f}%" for name, error in row["error"].items()}
        print(row["topology"], row["load"], told, flush=True)
    model = options.model if options.cpu else "qwen3-4b-shape"
    result = header("simulator_accuracy", label="accuracy", topology=None, model=model)
    load = dict(zip(("1_min", "5_min", "15_min"), psutil.getloadavg(), strict=True))
    content = {**result, "machine_load": load, "rows": rows, "summary": summary(rows)}
    write_result(options.output, content)


if __name__ == "__main__":
    main()
