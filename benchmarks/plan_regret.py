"""Is the topology that `tasuki plan` recommends the best one? Measured, with every other beside it.

    python benchmarks/plan_regret.py --gpus 2                 Qwen3-4B's shape, random weights
    python benchmarks/plan_regret.py --gpus 2 --fleets 2      two candidates at a time, on four GPUs
    python benchmarks/plan_regret.py                          SmolLM2 and two workers on a CPU
    python benchmarks/plan_regret.py --gpus 2 --tiny          the first form's code, on any machine
    python benchmarks/plan_regret.py ... --resume PATH        what a run whose time was over lacks

First a worker's steps are measured (or given, `--steps`), and the planner is asked for each load
and each pair of objectives. Only then is everything measured: each candidate is started once and
gets each load, open loop, Poisson, the same requests for all candidates. Rates are 12% apart. Each
pair of objectives begins at the rate where the candidate's goodput is highest in the simulator,
goes down until nine tenths of the requests meet them, and up until goodput falls. Goodput is of
requests that meet the objectives, by when they were due, without the first part of a run; a
candidate's is that at its best rate. *Regret* is what the recommended topology lacks of the best
measured one. Beside it: that of a candidate drawn at random, and of all mixed; and how well the
simulator ranks the candidates (Spearman).
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import queue
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from best_rate import APART, Seen, climb
from candidates import (
    CPU_GRID,
    CPU_LOADS,
    CPU_OBJECTIVES,
    GPU_LOADS,
    GPU_OBJECTIVES,
    TASUKI,
    Design,
    bench,
    designs,
    goodput,
    output_of,
    simulate,
)
from programs import ROOT

sys.path.append(str(Path(__file__).with_name("gpu")))
from shapes import QWEN3_4B, TINY, write_model

from tasuki.bench.arguments import words
from tasuki.bench.errors import RunFailedError
from tasuki.bench.header import header, write_result
from tasuki.bench.serving import Serving
from tasuki.launch.topology import threads_per_rank
from tasuki.models.fetch import resolve_model
from tasuki.processor import usable_cores

RESULT = ROOT / "benchmarks" / "results" / "plan_regret.json"
SETTLES = 0.3  # of a run: its first part does not count
SEED = 100  # of one request a second; each rate has its own prompts, so that none is cached
WARM = 6  # a server's first requests come at a rate lower by so many numbers
FOLDERS = re.compile(r"/(?:[\w.-]+/)+")  # of a machine: no result tells them
Row = dict[str, Any]


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
        self.plans: list[dict[str, Any]] = []
        self.runs: list[Row] = []
        self.failures: list[str] = []
        self.measured: list[str] = []  # designs that lack nothing
        self._resumed = json.loads(options.resume.read_text()) if options.resume else None
        if self._resumed:
            known = {run["load"] for run in self._resumed["runs"]}
            if known != set(self.loads):
                raise SystemExit(f"{options.resume} has the loads {sorted(known)}: name these")
            self.runs = self._resumed["runs"]
        # Where the planner is, and the simulated best of a design, by load and objectives.
        self._planned: dict[tuple[str, str], int] = {}
        self._expected: dict[tuple[str, str, str], int] = {}
        self._simulated: dict[tuple[str, str, int], Row] = {}

    @property
    def is_over(self) -> bool:
        """No run begins any more."""
        return time.monotonic() > self._until

    def steps(self) -> Path:
        """The table of one worker's steps: given, or measured now."""
        if self._options.steps:
            return Path(self._options.steps)
        output = self._scratch / "steps.json"
        if self._resumed:
            output.write_text(json.dumps(self._resumed["steps"]))
            return output
        grid = CPU_GRID if self._serve["device"] == "cpu" else {}
        command = [*TASUKI, "bench", "batch", "--steps", "--model", str(self._model)]
        command += [w for k, v in self._serve.items() for w in ("--serve", f"{k}={v}")]
        # Workers beside each other share the cores; the one that is measured gets its share too.
        threads = threads_per_rank(usable_cores(), self.workers)
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        subprocess.run([*command, *words({**grid, "output": output})], check=True, env=environment)
        return output

    def plan(self, steps: Path, candidates: list[Design]) -> None:
        """Ask the planner for all loads and objectives; a new design becomes a candidate."""
        for load, lengths in self.loads.items():
            for name, (ttft_s, tpot_s) in self.objectives.items():
                slo = f"ttft={ttft_s:g}s,tpot={1e3 * tpot_s:g}ms"
                said = {"steps": steps, "gpus": self.workers, "slo": slo, "no-variations": True}
                plan = output_of([*TASUKI, "plan", *words({**said, **lengths})])
                best, chosen = plan["best"], self._chosen(plan)
                # It is measured first, so that a run that ends early has it.
                if chosen not in candidates:
                    candidates.insert(0, chosen)
                rate = float(best["rate"])
                self._planned[load, name] = number_of(rate)
                told = {"load": load, "objectives": name, "recommended": chosen.name}
                self.plans.append({**told, "expected": best["at"]})
                print(f"{load}, {slo}: {chosen.name}, {rate:.2f} requests/s", flush=True)

    def _chosen(self, plan: Mapping[str, Any]) -> Design:
        design = plan["best"]["design"]
        counts = [design[role]["workers"] for role in ("prefill", "decode", "mixed")]
        sizes = [design["max_batched_tokens"], design["prefill_max_batched_tokens"]]
        asked = sizes if self._options.chunks else (None, None)
        target_ms = round(float(plan["itl_target_ms"]), 3)
        return Design(*counts, 1, bool(design["strict_roles"]), *asked, target_ms)

    def expect(self, design: Design, steps: Path) -> None:
        """Find a design's best rates in the simulator."""
        for (load, name), start in self._planned.items():

            def at(number: int, load: str = load, name: str = name) -> Seen:
                return dict(self._simulate(design, steps, load, number)[name])

            self._expected[design.name, load, name] = climb(at, start)

    def measure(self, design: Design, steps: Path, gpus: str | None) -> None:
        """Send a design each load at the rates around its best ones: those that are not known.

        Args:
            design: The candidate; started for the first of them.
            steps: For the simulator, which gets the same.
            gpus: As `CUDA_VISIBLE_DEVICES` names them.

        Raises:
            RunFailedError: It did not start, or a run failed.
        """
        log = self._scratch / f"{design.name.replace(' ', '-').replace('/', '-')}.log"
        said = {"model": self._model, **self._serve, **design.serve}
        seen = {} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus}
        with ExitStack() as stack:

            @functools.cache
            def url() -> str:
                server = Serving(design.topology, said, log, seen)
                stack.callback(server.stop)
                for load in self.loads:
                    planned = min(self._planned[load, name] for name in self.objectives)
                    bench(server.url, {**self._sent(load, planned - WARM), "duration-s": 3})
                return server.url

            known = [self._climb_all(url, design, steps, load) for load in self.loads]
            if all(known):
                self.measured.append(design.name)

    def _climb_all(self, url: Callable[[], str], design: Design, steps: Path, load: str) -> bool:
        """A load at the rates that each pair of objectives asks for; whether all are known now."""
        rows = {
            number_of(run["rate"]): run
            for run in self.runs
            if (run["load"], run["design"]) == (load, design.name)
        }
        complete = True
        for name in self.objectives:

            def at(number: int, name: str = name) -> Seen | None:
                nonlocal complete
                if number not in rows:
                    if self.is_over:
                        complete = False
                        return None
                    rows[number] = self._one(url(), design, steps, load, number)
                return dict(rows[number]["measured"][name])

            expected = self._expected.get((design.name, load, name))
            climb(at, self._planned[load, name] if expected is None else expected)
        return complete

    def _sent(self, load: str, number: int) -> dict[str, Any]:
        sent = {**self.loads[load], "request-rate": APART**number, "temperature": 0}
        sent |= {"seed": SEED + number, "duration-s": self._options.seconds}
        return {**sent, "tokenizer": self._model}

    def _one(self, url: str, design: Design, steps: Path, load: str, number: int) -> Row:
        """A run at one rate."""
        sent = self._sent(load, number)
        row: Row = {"load": load, "design": design.name, "rate": sent["request-rate"]}
        row["measured"] = self._told(bench(url, {**sent, "no-chunks": True}))
        if design.is_simulated:
            row["simulated"] = self._simulate(design, steps, load, number)
        self.runs.append(row)
        print(json.dumps(row), flush=True)
        return row

    def _simulate(self, design: Design, steps: Path, load: str, number: int) -> Row:
        """The same in the simulator."""
        key = (design.name, load, number)
        if key not in self._simulated:
            result = simulate(design, steps, self._sent(load, number))
            self._simulated[key] = self._told(result)
        return self._simulated[key]

    def _told(self, result: Mapping[str, Any]) -> Row:
        """What is kept of a run."""
        from_s, metrics = SETTLES * self._options.seconds, result["metrics"]
        told: Row = {}
        for name, limits in self.objectives.items():
            found = goodput(result, *limits, from_s)
            told[name] = dict(zip(("goodput", "attainment"), found, strict=True))
        told["failed"] = metrics["failed"]
        for key in ("ttft_ms", "tpot_ms"):
            told[key] = {part: metrics[key][part] for part in ("median", "p95")}
        return told

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
            mixed = [good for name, good in measured.items() if name.split()[0] == self._all_mixed]
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


def number_of(rate: float) -> int:
    """Of the nearest rate that is sent; it says which requests these are, also when resumed."""
    return round(math.log(rate, APART))


def _ranks(values: Sequence[float]) -> np.ndarray:
    """Of each value; equal ones share theirs."""
    all_of = np.asarray(values)
    return np.array([(all_of < one).sum() + (all_of <= one).sum() for one in all_of])


def _table_of(steps: Path) -> dict[str, Any]:
    """The step table without folders of the machine, and so without its command and digest."""
    content = json.loads(steps.read_text())
    content["model"] = Path(content["model"]).name
    return {key: value for key, value in content.items() if key not in ("command", "digest")}


def run_all(campaign: Campaign, candidates: list[Design], options: argparse.Namespace) -> None:
    """Plan, simulate, measure; after each candidate write, since what follows may fail."""
    name = "smollm2-135m" if not options.gpus else "tiny" if options.tiny else "qwen3-4b-shape"
    steps = campaign.steps()
    campaign.plan(steps, candidates)
    if options.only:
        named = {*options.only, *(plan["recommended"] for plan in campaign.plans)}
        candidates = [design for design in candidates if design.name in named]
    with ThreadPoolExecutor(usable_cores()) as threads:
        simulated = [design for design in candidates if design.is_simulated]
        list(threads.map(lambda design: campaign.expect(design, steps), simulated))
    shares: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    for number in range(options.fleets):
        first = number * options.gpus
        named = ",".join(str(gpu) for gpu in range(first, first + options.gpus))
        shares.put(named if options.fleets > 1 and not options.tiny else None)

    def measure(design: Design) -> None:
        share = shares.get()
        try:
            campaign.measure(design, steps, share)
        finally:
            shares.put(share)

    # A fleet ends with the thread that started it: these live as long as all of them.
    with ThreadPoolExecutor(options.fleets) as threads:
        running = {threads.submit(measure, design): design for design in candidates}
        for done in as_completed(running):
            try:
                done.result()
            except RunFailedError as error:
                reason = FOLDERS.sub("", str(error).splitlines()[0])
                campaign.failures.append(f"{running[done].name}: {reason}")
                print(campaign.failures[-1], flush=True)
            result = header("plan_regret", label="plan", topology=None, model=name)
            found = {"verdicts": list(campaign.verdicts()), "runs": campaign.runs}
            kept = {"steps": _table_of(steps), "failures": campaign.failures}
            kept |= {"measured": campaign.measured, "objectives": campaign.objectives}
            write_result(options.output, {**result, **found, **kept})


def main() -> None:
    """Ask for options, run, print the verdicts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=int, default=0, help="of a fleet")
    parser.add_argument("--fleets", type=int, default=1, help="beside each other, on other GPUs")
    parser.add_argument("--workers", type=int, default=2, help="without GPUs")
    parser.add_argument("--loads", nargs="+", choices=GPU_LOADS, default=list(GPU_LOADS))
    parser.add_argument("--chunks", type=int, nargs="*", default=[], help="prompt tokens of a step")
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="candidates besides the recommended ones, by name"
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="of a run")
    given = parser.add_mutually_exclusive_group()
    given.add_argument(
        "--steps", type=Path, help="of `tasuki bench batch --steps`, measured before"
    )
    given.add_argument(
        "--resume", type=Path, help="result of a run whose time was over, of the same loads"
    )
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU")
    parser.add_argument(
        "--limit-s", type=float, default=36_000, help="begin no run after this time"
    )
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    if options.fleets > 1 and not options.gpus:
        parser.error("--fleets needs --gpus: fleets beside each other on a CPU slow each other")
    with tempfile.TemporaryDirectory(prefix="tasuki-plan-") as scratch:
        campaign = Campaign(options, Path(scratch))
        candidates = designs(campaign.workers, options.chunks, parallel=options.gpus > 1)
        run_all(campaign, candidates, options)
        for each in campaign.verdicts():
            left_out = ("measured", "simulated", "expected")
            print(json.dumps({k: v for k, v in each.items() if k not in left_out}))


if __name__ == "__main__":
    main()
