"""Is the topology that `tasuki plan` recommends the best one? Measured, with every other beside it.

    python benchmarks/plan_regret.py --gpus 2                 Qwen3-4B's shape, random weights
    python benchmarks/plan_regret.py --gpus 4 --loads w2      four GPUs, one load
    python benchmarks/plan_regret.py                          SmolLM2 and two workers on a CPU
    python benchmarks/plan_regret.py --gpus 2 --tiny          the first form's code, on any machine

First a worker's steps are measured (or given, `--steps`), and the planner is asked for each load
and each pair of objectives. Only then is everything measured: each candidate is started once and
gets each load at rising rates, open loop, Poisson, the same requests for all candidates. Goodput is
of requests that meet the objectives, by when they were due; a candidate's is that at its best rate.
*Regret* is what the recommended topology lacks of the best measured one. Beside it: that of a
candidate drawn at random, and of all mixed; and how well the simulator ranks the candidates, which
it gets in the same runs (Spearman).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from programs import ROOT

sys.path.append(str(Path(__file__).with_name("gpu")))
from shapes import QWEN3_4B, TINY, write_model

from tasuki.bench.arguments import words
from tasuki.bench.errors import RunFailedError
from tasuki.bench.header import header, write_result
from tasuki.bench.serving import Serving
from tasuki.launch.config import Topology
from tasuki.launch.machine import usable_cores
from tasuki.launch.topology import threads_per_rank
from tasuki.models.fetch import resolve_model

TASUKI = (sys.executable, "-m", "tasuki")
RESULT = ROOT / "benchmarks" / "results" / "plan_regret.json"
Load = Mapping[str, Any]

GPU_LOADS: dict[str, Load] = {
    "w1": {"input-tokens": 512, "output-tokens": 512, "range-ratio": 0.99},
    "w2": {"input-tokens": 5_000, "output-tokens": 250, "range-ratio": 0.5},
    "chat": {"input-tokens": 2_000, "output-tokens": 300, "range-ratio": 0.5},
    "answers": {"input-tokens": 250, "output-tokens": 1_000, "range-ratio": 0.5},
}
CPU_LOADS: dict[str, Load] = {
    "w1": {"input-tokens": 96, "output-tokens": 64, "range-ratio": 0.9},
    "w2": {"input-tokens": 640, "output-tokens": 16, "range-ratio": 0.5},
    "chat": {"input-tokens": 256, "output-tokens": 32, "range-ratio": 0.5},
    "answers": {"input-tokens": 32, "output-tokens": 96, "range-ratio": 0.5},
}
GPU_OBJECTIVES = {"tight": (1.0, 0.012), "loose": (2.0, 0.025)}  # TTFT, TPOT in seconds
CPU_OBJECTIVES = {"tight": (1.0, 0.06), "loose": (3.0, 0.15)}
GPU_GRID = {
    "prefill-tokens": "64,512,2048,4096",
    "prefill-context": "0,4096",
    "decode-batch": "1,16,64,128",
    "decode-context": "512,4096",
    "transfer-blocks": "1,32,160",
    "repeat": 3,
}
CPU_GRID = {
    "prefill-tokens": "16,64,256,512",
    "prefill-context": "0,512",
    "decode-batch": "1,2,4,8,16",
    "decode-context": "128,512",
    "transfer-blocks": "1,16,64",
    "repeat": 3,
}
LADDER = (0.6, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0)  # of what the planner expects of its best
HOPELESS = 0.5  # where fewer requests meet any objectives, higher rates are left out


@dataclass(frozen=True, slots=True)
class Design:
    """Workers, ranks of each, whether roles are strict, prompt tokens of a step."""

    prefill: int
    decode: int
    mixed: int
    ranks: int = 1
    strict: bool = False
    chunk: int | None = None

    @property
    def name(self) -> str:
        counts = ((self.prefill, "p"), (self.decode, "d"), (self.mixed, "m"))
        parts = ["".join(f"{count}{role}" for count, role in counts if count)]
        parts += [f"tp{self.ranks}"] if self.ranks > 1 else []
        parts += ["strict"] if self.strict else []
        parts += [str(self.chunk)] if self.chunk else []
        return " ".join(parts)

    @property
    def said(self) -> dict[str, Any]:
        """Options that `tasuki serve` and `tasuki simulate` have in common."""
        strict = {"strict-roles": True} if self.strict else {}
        return strict | ({"max-batched-tokens": self.chunk} if self.chunk else {})

    @property
    def serve(self) -> dict[str, Any]:
        roles = ("prefill", "decode", "mixed")
        tp = {f"tp-{role}": self.ranks for role in roles if getattr(self, role)}
        return self.said | (tp if self.ranks > 1 else {})

    @property
    def topology(self) -> Topology:
        return Topology(self.prefill, self.decode, self.mixed)


def designs(workers: int, chunks: Sequence[int], *, parallel: bool) -> list[Design]:
    """All mixed, every strict split, one soft one, by prompt tokens a step; tensor parallelism."""
    found = []
    for chunk in chunks or (None,):
        found.append(Design(0, 0, workers, chunk=chunk))
        found += [Design(n, workers - n, 0, 1, True, chunk) for n in range(1, workers)]
        found.append(Design(0, 1, workers - 1, chunk=chunk))
        if parallel:
            degrees = (2**n for n in range(1, workers.bit_length()) if workers % 2**n == 0)
            found += [Design(0, 0, workers // n, n, chunk=chunk) for n in degrees]
    return found


def bench(url: str, load: Load) -> dict[str, Any]:
    """One run of `tasuki bench serve`; its result."""
    return _output([*TASUKI, "bench", "serve", "--base-url", url, "--quiet", *words(load)])


def simulate(design: Design, steps: Path, load: Load) -> dict[str, Any]:
    """The same before workers that are simulated."""
    load = {name: value for name, value in load.items() if name != "temperature"}
    roles = {role: getattr(design, role) for role in ("prefill", "decode", "mixed")}
    said = {**roles, **design.said, "steps": steps}
    return _output([*TASUKI, "simulate", *words({**said, **load})])


def _output(command: Sequence[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "result.json"
        done = subprocess.run(
            [*command, "--output", str(output)], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise RunFailedError(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        return dict(json.loads(output.read_text()))


def goodput(result: Mapping[str, Any], ttft_s: float, tpot_s: float) -> tuple[float, float]:
    """Requests a second that meet the objectives, and their share of all."""
    requests, met = result["requests"], 0
    fields = (requests[key] for key in ("error", "due_s", "first_s", "end_s", "output_tokens"))
    for error, due, first, end, tokens in zip(*fields, strict=True):
        if error or first is None:
            continue
        tpot = (end - first) / max(tokens - 1, 1)
        met += first - due <= ttft_s and tpot <= tpot_s
    sent = len(requests["due_s"])
    return met / max(requests["due_s"][-1], 1e-9), met / sent


class Campaign:
    """What is planned, measured and simulated."""

    def __init__(self, options: argparse.Namespace, scratch: Path) -> None:
        self._options, self._scratch = options, scratch
        gpus, tiny = options.gpus > 0, options.tiny
        self.workers = options.gpus or options.workers
        self.loads = {n: (GPU_LOADS if gpus and not tiny else CPU_LOADS)[n] for n in options.loads}
        self.objectives = GPU_OBJECTIVES if gpus and not tiny else CPU_OBJECTIVES
        if gpus:
            model = write_model(scratch / "model", TINY if tiny else QWEN3_4B)
        else:
            model = resolve_model("smollm2-135m")
        self._model = model
        self._serve: dict[str, Any] = {"device": "cuda" if gpus and not tiny else "cpu"}
        self._serve |= {"load-format": "dummy"} if gpus else {}
        self._until = time.monotonic() + options.limit_s
        self.runs: list[dict[str, Any]] = []
        self.plans: list[dict[str, Any]] = []
        self.failures: list[str] = []

    @property
    def is_over(self) -> bool:
        """No run begins any more."""
        return time.monotonic() > self._until

    def steps(self) -> Path:
        """The table of one worker's steps: given, or measured now."""
        if self._options.steps:
            return Path(self._options.steps)
        output = self._scratch / "steps.json"
        grid = CPU_GRID if self._serve["device"] == "cpu" else GPU_GRID
        command = [*TASUKI, "bench", "batch", "--steps", "--model", str(self._model)]
        command += [w for k, v in self._serve.items() for w in ("--serve", f"{k}={v}")]
        # Workers beside each other share the cores; the one that is measured gets its share too.
        threads = threads_per_rank(usable_cores(), self.workers)
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        subprocess.run([*command, *words({**grid, "output": output})], check=True, env=environment)
        return output

    def plan(self, steps: Path, candidates: list[Design]) -> dict[str, float]:
        """Ask the planner for all loads and objectives; the highest rate by load.

        A recommended design that is no candidate becomes one.
        """
        rates: dict[str, float] = {}
        for load, lengths in self.loads.items():
            for name, (ttft_s, tpot_s) in self.objectives.items():
                slo = f"ttft={ttft_s:g}s,tpot={1e3 * tpot_s:g}ms"
                said = {"steps": steps, "gpus": self.workers, "slo": slo, "no-variations": True}
                found = _output([*TASUKI, "plan", *words({**said, **lengths})])
                best = found["best"]
                counts = [
                    best["design"][role]["workers"] for role in ("prefill", "decode", "mixed")
                ]
                strict = bool(best["design"]["strict_roles"])
                chunk = int(best["design"]["max_batched_tokens"])
                chosen = Design(*counts, 1, strict, chunk if self._options.chunks else None)
                if chosen not in candidates:
                    candidates.append(chosen)
                rates[load] = max(rates.get(load, 0.0), float(best["rate"]))
                told = {"load": load, "objectives": name, "recommended": chosen.name}
                self.plans.append({**told, "expected": best["at"]})
                print(f"{load}, {slo}: {chosen.name}, {best['rate']:.2f} requests/s", flush=True)
        return rates

    def measure(self, design: Design, steps: Path, rates: Mapping[str, float]) -> None:
        """Start a design, send every load at rising rates, and simulate the same."""
        log = self._scratch / f"{design.name.replace(' ', '-')}.log"
        try:
            said = {"model": self._model, **self._serve, **design.serve}
            server = Serving(design.topology, said, log)
        except RunFailedError as error:
            self.failures.append(f"{design.name}: {str(error).splitlines()[0]}")
            print(self.failures[-1], flush=True)
            return
        try:
            for load in self.loads:
                bench(server.url, {**self._sent(load, rates[load] / 2, 0), "duration-s": 3})
                for number, share in enumerate(LADDER, 1):
                    sent = self._sent(load, share * rates[load], number)
                    if self.is_over or not self._one(server.url, design, steps, load, sent):
                        break
        finally:
            server.stop()

    def _sent(self, load: str, rate: float, number: int) -> dict[str, Any]:
        """Each run of a design gets prompts that its workers have not seen: none is cached."""
        sent = {**self.loads[load], "request-rate": rate, "temperature": 0, "seed": 7 + number}
        return {**sent, "tokenizer": self._model, "duration-s": self._options.seconds}

    def _one(self, url: str, design: Design, steps: Path, load: str, sent: Load) -> bool:
        """A run at one rate; whether a higher one is worth a try."""
        measured = bench(url, {**sent, "no-chunks": True})
        row: dict[str, Any] = {"load": load, "design": design.name, "rate": sent["request-rate"]}
        results = {"measured": measured}
        if design.ranks == 1:
            results["simulated"] = simulate(design, steps, sent)
        for way, result in results.items():
            metrics = result["metrics"]
            row[way] = {
                **{
                    name: dict(
                        zip(("goodput", "attainment"), goodput(result, *limits), strict=True)
                    )
                    for name, limits in self.objectives.items()
                },
                "failed": metrics["failed"],
                "ttft_ms": {key: metrics["ttft_ms"][key] for key in ("median", "p95")},
                "tpot_ms": {key: metrics["tpot_ms"][key] for key in ("median", "p95")},
            }
        self.runs.append(row)
        print(json.dumps(row), flush=True)
        return any(row["measured"][name]["attainment"] >= HOPELESS for name in self.objectives)

    def verdicts(self) -> Iterator[dict[str, Any]]:
        """For each load and objectives: goodput by design, and what the recommended one lacks."""
        for plan in self.plans:
            best: dict[str, dict[str, float]] = {"measured": {}, "simulated": {}}
            for run in (run for run in self.runs if run["load"] == plan["load"]):
                for way, by_design in best.items():
                    if way in run:
                        good = run[way][plan["objectives"]]["goodput"]
                        by_design[run["design"]] = max(good, by_design.get(run["design"], 0.0))
            measured = best["measured"]
            if plan["recommended"] not in measured:
                continue
            most = max(measured.values())
            mixed = [good for name, good in measured.items() if name.startswith(self._all_mixed)]
            both = [name for name in measured if name in best["simulated"]]
            ranks = [_ranks([best[way][name] for name in both]) for way in best]
            differ = len(both) > 2 and all(np.ptp(found) > 0 for found in ranks)
            yield {
                **plan,
                **best,
                "best": max(measured, key=lambda name: measured[name]),
                "regret": 1 - measured[plan["recommended"]] / most,
                "regret_random": 1 - float(np.mean(list(measured.values()))) / most,
                "regret_mixed": 1 - max(mixed) / most if mixed else None,
                "rank_correlation": float(np.corrcoef(*ranks)[0, 1]) if differ else None,
            }

    @property
    def _all_mixed(self) -> str:
        return f"{self.workers}m"


def _ranks(values: Sequence[float]) -> np.ndarray:
    """Of each value; equal ones share theirs."""
    all_of = np.asarray(values)
    return np.array([(all_of < one).sum() + (all_of <= one).sum() for one in all_of])


def main() -> None:
    """Plan, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2, help="without GPUs")
    parser.add_argument("--loads", nargs="+", choices=GPU_LOADS, default=list(GPU_LOADS))
    parser.add_argument("--chunks", type=int, nargs="*", default=[], help="prompt tokens of a step")
    parser.add_argument("--seconds", type=float, default=20.0, help="of a run")
    parser.add_argument(
        "--steps", type=Path, help="of `tasuki bench batch --steps`, measured before"
    )
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU")
    parser.add_argument(
        "--limit-s", type=float, default=36_000, help="begin no run after this time"
    )
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tasuki-plan-") as scratch:
        campaign = Campaign(options, Path(scratch))
        parallel = options.gpus > 1
        candidates = designs(campaign.workers, options.chunks, parallel=parallel)
        steps = campaign.steps()
        rates = campaign.plan(steps, candidates)
        name = "smollm2-135m" if not options.gpus else "tiny" if options.tiny else "qwen3-4b-shape"
        found: list[dict[str, Any]] = []
        for design in candidates:
            if campaign.is_over:
                break
            campaign.measure(design, steps, rates)
            found = list(campaign.verdicts())
            result = header("plan_regret", label="plan", topology=None, model=name)
            result |= {"verdicts": found, "runs": campaign.runs, "failures": campaign.failures}
            write_result(options.output, result)  # what is measured outlives what comes after it
    for each in found:
        told = {k: v for k, v in each.items() if k not in ("measured", "simulated", "expected")}
        print(json.dumps(told))


if __name__ == "__main__":
    main()
