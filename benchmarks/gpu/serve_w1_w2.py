"""The peer's two workloads on `tasuki serve`, in several topologies, beside the peer's figures.

    python benchmarks/gpu/serve_w1_w2.py                         2 GPUs
    python benchmarks/gpu/serve_w1_w2.py --topologies 1mixed     1 GPU
    python benchmarks/gpu/serve_w1_w2.py --topologies tp2        2 GPUs, one worker
    python benchmarks/gpu/serve_w1_w2.py --tiny --device cpu     the same code on any machine

Qwen3-4B's shape with random weights (`--load-format dummy`). W1: 1,000 requests,
inputs and outputs uniform in 5..1019 tokens, 100 at a time. W2: 300 requests of
5,000 in and 250 out, 48 at a time. All answers have all their tokens
(ignore_eos); prompts are random, others in each repeat, so no prefix is ever in
a cache. Load is sent and measured by `tasuki bench serve`, through the router; a
few requests of the same kind run before, unmeasured. The peer's figures are one
run each on 2 x H200, client `vllm bench serve`, through vllm-router (see notes in
RESULTS.md).
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from shapes import QWEN3_4B, TINY, write_model

from tasuki.bench.errors import RunFailedError
from tasuki.bench.header import header, own_command, write_result
from tasuki.bench.serving import Serving
from tasuki.launch.config import Topology

REPOSITORY = Path(__file__).resolve().parents[2]
RESULT = REPOSITORY / "benchmarks" / "results" / "serve_w1_w2.json"
TOPOLOGIES = {
    "1p1d": Topology(1, 1, 0),
    "1mixed1d": Topology(0, 1, 1),
    "2mixed": Topology(0, 0, 2),
    "1mixed": Topology(0, 0, 1),
    "tp2": Topology(0, 0, 1),
}
OPTIONS: dict[str, dict[str, Any]] = {"tp2": {"tp-mixed": 2}}  # of `tasuki serve`, by topology
W1 = ("--input-tokens", "512", "--output-tokens", "512", "--range-ratio", "0.99")  # 5..1019
W2 = ("--lengths", "5000:250")
COLUMNS = (
    ("output tok/s", "output_throughput"),
    ("total tok/s", "total_throughput"),
    ("TTFT mean ms", "ttft_mean_ms"),
    ("p99", "ttft_p99_ms"),
    ("TTST-TTFT p99", "second_gap_p99_ms"),
    ("TPOT mean", "tpot_mean_ms"),
    ("ITL p99", "itl_p99_ms"),
    ("E2E mean", "e2e_mean_ms"),
    ("exposed p50", "exposed_p50_ms"),
    ("p99", "exposed_p99_ms"),
)


@dataclass(frozen=True, slots=True)
class Workload:
    """Options of `tasuki bench serve`, and what of it the issue names."""

    requests: int
    at_a_time: int
    options: tuple[str, ...]


WORKLOADS = {"w1": Workload(1_000, 100, W1), "w2": Workload(300, 48, W2)}
TINY_WORKLOADS = {
    "w1": Workload(24, 8, ("--input-tokens", "32", "--output-tokens", "16")),
    "w2": Workload(8, 4, ("--lengths", "300:8")),
}

# vLLM 0.26.0 with vllm-router 0.1.17 on 2 x H200, Qwen3-4B's shape, prefix caching off.
PEER: dict[str, dict[str, dict[str, float]]] = {
    "w1": {
        "vLLM split 1:1": {
            "output_throughput": 12_148.4,
            "total_throughput": 24_464.1,
            "ttft_mean_ms": 215.9,
            "ttft_p99_ms": 1_027.4,
            "tpot_mean_ms": 7.35,
            "itl_p99_ms": 20.3,
            "e2e_mean_ms": 4_042.6,
        },
        "vLLM 2 colocated": {
            "output_throughput": 13_592.9,
            "total_throughput": 27_372.9,
            "ttft_mean_ms": 89.6,
            "ttft_p99_ms": 491.5,
            "tpot_mean_ms": 6.79,
            "itl_p99_ms": 42.2,
            "e2e_mean_ms": 3_616.8,
        },
        "vLLM TP=2": {
            "output_throughput": 12_872,
            "ttft_mean_ms": 153,
            "ttft_p99_ms": 613,
            "tpot_mean_ms": 7.18,
            "itl_p99_ms": 47.7,
        },
    },
    "w2": {
        "vLLM split 1:1": {
            "output_throughput": 2_639.7,
            "total_throughput": 55_433.9,
            "ttft_mean_ms": 631.0,
            "ttft_p99_ms": 3_648.5,
            "tpot_mean_ms": 15.15,
            "itl_p99_ms": 50.0,
            "e2e_mean_ms": 4_404.2,
        },
        "vLLM 2 colocated": {
            "output_throughput": 3_092.4,
            "total_throughput": 64_939.5,
            "ttft_mean_ms": 427.4,
            "ttft_p99_ms": 1_791.2,
            "tpot_mean_ms": 13.23,
            "itl_p99_ms": 121.5,
            "e2e_mean_ms": 3_721.2,
        },
        "vLLM TP=2": {
            "total_throughput": 60_655,
            "ttft_mean_ms": 588,
            "ttft_p99_ms": 2_273,
            "tpot_mean_ms": 13.75,
            "itl_p99_ms": 84,
        },
    },
}
REACH = {
    "w1": {
        "reach split 1:1": {"output_throughput": 15_500, "ttft_mean_ms": 80, "itl_p99_ms": 10}
        | {"second_gap_p99_ms": 15},
        "reach 2 colocated": {"output_throughput": 18_000, "itl_p99_ms": 20},
        "reach TP=2": {"output_throughput": 16_000},
    },
    "w2": {
        "reach split 1:1": {"total_throughput": 62_000, "itl_p99_ms": 15},
        "reach best mode": {"total_throughput": 70_000},
    },
}


def figures(result: dict[str, Any]) -> dict[str, float]:
    """What the table shows of a result file."""
    metrics, requests = result["metrics"], result["requests"]
    gaps = [
        1e3 * (second - first)
        for first, second in zip(requests["first_s"], requests["second_s"], strict=True)
        if first is not None and second is not None
    ]
    exposed = (metrics.get("phases") or {}).get("transfer_exposed_ms") or {}
    found = {
        "output_throughput": metrics["output_throughput"],
        "total_throughput": metrics["total_throughput"],
        "ttft_mean_ms": metrics["ttft_ms"]["mean"],
        "ttft_p99_ms": metrics["ttft_ms"]["p99"],
        "second_gap_p99_ms": percentile(gaps, 0.99),
        "tpot_mean_ms": metrics["tpot_ms"]["mean"],
        "itl_p99_ms": metrics["itl_ms"]["p99"],
        "e2e_mean_ms": metrics["e2e_ms"]["mean"],
        "exposed_p50_ms": exposed.get("median"),
        "exposed_p99_ms": exposed.get("p99"),
        "failed": metrics["failed"],
        "duration_s": metrics["duration_s"],
    }
    return {key: value for key, value in found.items() if value is not None}


def percentile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that `share` of them do not exceed."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def measure(
    server: Serving, model: Path, workload: Workload, label: str, seed: int, out: Path
) -> None:
    """One run of `tasuki bench serve`; the result is in `out`."""
    command = [sys.executable, "-m", "tasuki", "bench", "serve", "--base-url", server.url]
    command += ["--model", server.model, "--tokenizer", str(model), *workload.options]
    command += ["--num-requests", str(workload.requests), "--warmup", str(workload.at_a_time)]
    command += ["--max-concurrency", str(workload.at_a_time), "--answers", "exact", "--quiet"]
    command += ["--no-chunks", "--label", label, "--output", str(out), "--seed", str(seed)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        said = f"{done.stdout[-3000:]}{done.stderr[-3000:]}"
        raise RunFailedError(f"{shlex.join(command)}\n{said}")
    if ended := server.ended():
        raise RunFailedError(ended)


def phases_of(log: Path) -> list[str]:
    """How long each worker's start took, in its own words."""
    found = re.findall(r"worker=(\S+) .*(started in .*)", log.read_text(errors="replace"))
    return [f"{worker} {account}" for worker, account in found]


def medians(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Of each figure over the repeats."""
    keys = [key for key, value in rows[0].items() if not isinstance(value, str)]
    return {key: statistics.median(row[key] for row in rows if key in row) for key in keys}


def show(name: str, ours: dict[str, dict[str, float]]) -> None:
    """The table of one workload."""
    print(f"\n{name.upper()}".ljust(24) + "".join(f"{title:>15}" for title, _ in COLUMNS))
    for label, row in (ours | PEER[name] | REACH[name]).items():
        cells = (f"{row[key]:>15,.1f}" if key in row else f"{'-':>15}" for _, key in COLUMNS)
        failed = f"   {row['failed']:.0f} FAILED" if row.get("failed") else ""
        print(label.ljust(23) + "".join(cells) + failed, flush=True)


class Campaign:
    """What is run, and what came of it.

    Attributes:
        starts: By topology, each worker's name and its account of its start.
        runs: Each run's figures.
        failures: What went wrong, one text each.
        out_of_time: The limit is over.
    """

    def __init__(self, arguments: argparse.Namespace, scratch: Path) -> None:
        self._arguments = arguments
        self._scratch = scratch
        self._workloads = TINY_WORKLOADS if arguments.tiny else WORKLOADS
        shape = TINY if arguments.tiny else QWEN3_4B
        self._model = write_model(scratch / "qwen3-4b-shape", shape)
        self.starts: dict[str, list[str]] = {}
        self.runs: list[dict[str, Any]] = []
        self.failures: list[str] = []
        self.out_of_time = False
        self._server: Serving | None = None

    def run(self, topology: str, options: dict[str, Any]) -> None:
        """All workloads on one topology; what fails is kept for the end."""
        log = self._scratch / f"{topology}.log"
        try:
            said = {"model": self._model, **options, **OPTIONS.get(topology, {})}
            server = Serving(TOPOLOGIES[topology], said, log)
            self._server = server
            try:
                self.starts[topology] = phases_of(log)
                print(*(f"{topology}: {start}" for start in self.starts[topology]), sep="\n")
                for name in self._arguments.workloads:
                    for repeat in range(self._arguments.repeats):
                        self._measure(server, topology, name, repeat)
            finally:
                server.stop()
        except RunFailedError as error:
            lines = log.read_text(errors="replace").splitlines(keepends=True)
            end = "".join(line for line in lines if "request ended" not in line)[-14000:]
            self.failures.append(f"{topology}: {error}\n{end}")
            print(self.failures[-1], flush=True)

    def give_up(self, *_: object) -> None:
        """A signal's handler: tell where the workers are, and fail what runs.

        Raises:
            RunFailedError: Always.
        """
        self.out_of_time = True
        if self._server is not None:
            try:
                with urllib.request.urlopen(f"{self._server.url}/metrics", timeout=2) as answer:
                    lines = answer.read().decode().splitlines()
                told = ("output_tokens_total", "steps_total", "running", "waiting", "decode_step")
                print(*(x for x in lines if x[0] != "#" and any(t in x for t in told)), sep="\n")
            except OSError as error:
                print(f"no metrics: {error}")
            for child in psutil.Process().children(recursive=True):  # PYTHONFAULTHANDLER: stacks
                if {"worker", "tasuki.worker.rank_process"} & set(child.cmdline()):
                    child.send_signal(signal.SIGABRT)
            time.sleep(2.0)
        raise RunFailedError("the time that --limit-s gives is over")

    def tables(self) -> dict[str, dict[str, dict[str, float]]]:
        """Medians over the repeats, by workload and topology."""
        found: dict[str, dict[str, dict[str, float]]] = {n: {} for n in self._arguments.workloads}
        for name, table in found.items():
            for topology in self._arguments.topologies:
                rows = [r for r in self.runs if (r["workload"], r["topology"]) == (name, topology)]
                if rows:
                    table[f"tasuki {topology}"] = medians(rows)
        return found

    def write(self, options: dict[str, Any]) -> None:
        """The result file, as far as it goes.

        Args:
            options: Of `tasuki serve`, for all topologies.
        """
        result = header(
            "w1_w2", command=own_command(), label="w1_w2", topology=None, model="qwen3-4b-shape"
        )
        result |= {"serve": options, "starts": self.starts, "runs": self.runs}
        result |= {"medians": self.tables(), "peer": PEER, "failures": self.failures}
        write_result(self._arguments.out, result)

    def _measure(self, server: Serving, topology: str, name: str, repeat: int) -> None:
        folder = self._arguments.keep or self._scratch
        out = folder / f"{topology}-{name}-{repeat}.json"
        label = f"{topology} {name}"
        measure(server, self._model, self._workloads[name], label, repeat, out)
        row = figures(json.loads(out.read_text()))
        self.runs.append({"topology": topology, "workload": name, **row})
        print(json.dumps(self.runs[-1]), flush=True)


def main() -> int:
    """Measure, print, write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--topologies", nargs="+", choices=TOPOLOGIES, default=["1p1d", "2mixed"])
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=["w1", "w2"])
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and few requests")
    parser.add_argument("--serve", default="", help="more options of `tasuki serve`, quoted")
    parser.add_argument(
        "--limit-s", type=int, default=0, help="give up then, with stacks; 0: never"
    )
    parser.add_argument("--keep", type=Path, help="folder for the result file of each run")
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    options: dict[str, Any] = {"device": arguments.device, "load-format": "dummy"}
    more = shlex.split(arguments.serve)
    for flag, value in zip(more[::2], more[1::2], strict=True):
        options[flag.removeprefix("--")] = value
    if arguments.keep:
        arguments.keep.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="tasuki-w1-w2-") as scratch:
        campaign = Campaign(arguments, Path(scratch))
        signal.signal(signal.SIGALRM, campaign.give_up)
        signal.alarm(arguments.limit_s)
        for topology in arguments.topologies:
            if not campaign.out_of_time:
                campaign.run(topology, options)
                campaign.write(options)  # what is measured outlives what comes after it
    for name, table in campaign.tables().items():
        show(name, table)
    print(f"written: {arguments.out}")
    return 1 if campaign.failures else 0


if __name__ == "__main__":
    sys.exit(main())
