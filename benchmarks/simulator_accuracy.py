"""How far the simulator is off, against measured runs that were not used to fit it.

    python benchmarks/simulator_accuracy.py --output benchmarks/results/simulator_accuracy.json
    python benchmarks/simulator_accuracy.py --cpu --output FILE       measures on this machine first

The first form needs no GPU: W1 and W2 as they were measured on two H200s (`serve_w1_w2.json`,
`serve_roles.json`, `serve_split_strict.json`), simulated from step times of the same shape that
other programs measured alone (`gpu_steps.json`, `gpu_mixed_steps.json`, fitted by `overload.py`).
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
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
from overload import fit
from programs import ROOT

sys.path.append(str(Path(__file__).with_name("gpu")))
from w1_w2 import WORKLOADS

from tasuki.bench.arguments import words
from tasuki.bench.header import header, write_result
from tasuki.bench.serving import Serving
from tasuki.launch.config import Topology

TASUKI = (sys.executable, "-m", "tasuki")
RESULTS = ROOT / "benchmarks" / "results"
MEASURED = ("serve_w1_w2.json", "serve_roles.json", "serve_split_strict.json")
SHAPES: dict[str, dict[str, Any]] = {
    "2mixed": {"mixed": 2},
    "1mixed1d": {"mixed": 1, "decode": 1},
    "1p1d": {"prefill": 1, "decode": 1, "strict-roles": True},
}
KV_BYTES_PER_TOKEN = 147_456  # Qwen3-4B's shape in bfloat16
BLOCKS = 25_000  # of 32 tokens, beside its weights on an H200
METRICS = {
    "output_throughput": ("output_throughput", None),
    "ttft_mean_ms": ("ttft_ms", "mean"),
    "ttft_p50_ms": ("ttft_ms", "median"),
    "ttft_p95_ms": ("ttft_ms", "p95"),
    "tpot_mean_ms": ("tpot_ms", "mean"),
    "itl_p99_ms": ("itl_ms", "p99"),
    "e2e_mean_ms": ("e2e_ms", "mean"),
}
CPU_RATES = (0.5, 1.0)
CPU_LOAD = {"input-tokens": 200, "output-tokens": 40, "range-ratio": 0.5, "temperature": 0}
CPU_TOPOLOGIES = {"1mixed": {"mixed": 1}, "1p1d": SHAPES["1p1d"]}
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


def on_h200() -> Iterator[dict[str, Any]]:
    """W1 and W2 in each topology that was measured."""
    rates = h200_rates()
    for file in MEASURED:
        runs = json.loads((RESULTS / file).read_text())["runs"]
        for topology, shape in SHAPES.items():
            for name, workload in WORKLOADS.items():
                of_both = [r for r in runs if (r["topology"], r["workload"]) == (topology, name)]
                if not of_both:
                    continue
                measured = {
                    metric: statistics.median(run[metric] for run in of_both)
                    for metric in METRICS
                    if metric in of_both[0]
                }
                options = {
                    **shape,
                    "rates": rates,
                    "kv-bytes-per-token": KV_BYTES_PER_TOKEN,
                    "num-blocks": BLOCKS,
                    "max-model-len": 16_384,
                    "num-requests": workload.requests,
                    "max-concurrency": workload.at_a_time,
                }
                load = dict(
                    zip(*[iter(w.removeprefix("--") for w in workload.options)] * 2, strict=True)
                )
                simulated = picked(simulate(options, load))
                yield {
                    "measured_in": file,
                    "runs": len(of_both),
                    "topology": topology,
                    "load": name,
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
    for row in on_cpu(options.model, options.requests) if options.cpu else on_h200():
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
