"""Roles that follow the load, against every static topology, on real workers.

    python benchmarks/roles_follow_served.py                  SmolLM2, two workers on a CPU
    python benchmarks/roles_follow_served.py --gpus 2         Qwen3-4B's shape, random weights
    python benchmarks/roles_follow_served.py --gpus 2 --chat  the same under other objectives
    python benchmarks/roles_follow_served.py --gpus 2 --phases w1 w2    two of the three loads
    python benchmarks/roles_follow_served.py --gpus 2 --tiny  the second form's code, on any machine

`roles_follow.py` does the same in simulated time with more loads, workers and deciders. Here
`tasuki serve` is started once for each topology with strict roles, and twice with `--roles follow`:
as all mixed and as a split. All get the same trace: W1, W2 and their mixture, a phase each, at
rates that the best of them can just serve; with `--chat` W1 and then prompts of 2,000 tokens with
answers of 300, at somewhat more than that. A request is good if it meets both objectives; goodput
counts good requests by when they were due, the first seconds of a phase included.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from candidates import bench
from programs import ROOT
from roles_follow import KINDS, RATES, TPOT_S, TTFT_S, compared, topologies

sys.path.append(str(Path(__file__).with_name("gpu")))
from shapes import QWEN3_4B, TINY, write_model

from tasuki.bench.header import header, write_result
from tasuki.bench.serving import Serving
from tasuki.launch.config import Topology
from tasuki.models.fetch import resolve_model

RESULT = ROOT / "benchmarks" / "results" / "roles_follow_served.json"
WARM_S = 5.0
CHANGED = "changes a role"  # in the router's log


@dataclass(frozen=True, slots=True)
class Load:
    """Kinds of requests by phase, how many come in a second, objectives in seconds.

    Phases follow each other as in `rates`.
    """

    kinds: Mapping[str, Any]
    rates: Mapping[str, float]
    ttft_s: float
    tpot_s: float

    @property
    def phases(self) -> tuple[str, ...]:
        return tuple(self.rates)


_W1 = {"input": [9, 183], "output": [6, 122]}
_W2 = {"input": [320, 960], "output": [8, 24]}
ON_CPU = Load(
    {
        "w1": [{"weight": 1, **_W1}],
        "w2": [{"weight": 1, **_W2}],
        "mixture": [{"weight": 3, **_W1}, {"weight": 1, **_W2}],
    },
    {"w1": 11.0, "w2": 3.5, "mixture": 7.0},
    ttft_s=2.0,
    tpot_s=0.1,
)
ON_GPUS = Load(KINDS, {kind: 2 * rate for kind, rate in RATES.items()}, TTFT_S, TPOT_S)
# By TPOT in ms: two mixed workers serve W1 best, and a split chat, as `tasuki simulate` says with
# an H200's steps.
CHAT_RATES = {12: {"w1": 56.0, "chat": 32.0}, 10: {"w1": 46.0, "chat": 27.0}}
CHAT = [{"weight": 1, "input": [1000, 3000], "output": [150, 450]}]


def chat_on_gpus(tpot_ms: int) -> Load:
    """W1 and then chat."""
    kinds = {"w1": KINDS["w1"], "chat": CHAT}
    return Load(kinds, CHAT_RATES[tpot_ms], ttft_s=1.0, tpot_s=tpot_ms / 1e3)


def write_trace(path: Path, load: Load, phase_s: float) -> None:
    """One phase after another, Poisson within each, in Mooncake's format."""
    draw = random.Random(4711)
    with path.open("w") as file:
        for number, phase in enumerate(load.phases):
            kinds, at = load.kinds[phase], draw.expovariate(load.rates[phase])
            while at < phase_s:
                kind = draw.choices(kinds, [kind["weight"] for kind in kinds])[0]
                line = {
                    "timestamp": 1e3 * (number * phase_s + at),
                    "input_length": draw.randint(*kind["input"]),
                    "output_length": draw.randint(*kind["output"]),
                    "hash_ids": [],
                }
                file.write(json.dumps(line) + "\n")
                at += draw.expovariate(load.rates[phase])


def cases(static: Sequence[str]) -> Iterator[tuple[str, Topology, str]]:
    """Name, workers, `--roles`: the static ones first."""
    for name in static:
        yield name, Topology(*topologies(2)[name]), "fixed"
    yield "follow, from mixed", Topology(0, 0, 2), "follow"
    yield "follow, from split", Topology(1, 1, 0), "follow"


def by_phase(result: Mapping[str, Any], load: Load, phase_s: float) -> list[dict[str, Any]]:
    """Goodput of each phase, and what its requests missed."""
    found: list[dict[str, Any]] = [
        {"load": phase, "sent": 0, "good": 0, "failed": 0, "late": 0, "slow": 0}
        for phase in load.phases
    ]
    fields = (result["requests"][key] for key in ("error", "due_s", "first_s", "end_s"))
    tokens = result["requests"]["output_tokens"]
    for error, due, first, end, count in zip(*fields, tokens, strict=True):
        row = found[min(int(due / phase_s), len(found) - 1)]
        row["sent"] += 1
        if error or first is None:
            row["failed"] += 1
        elif first - due > load.ttft_s:
            row["late"] += 1
        elif (end - first) / max(count - 1, 1) > load.tpot_s:
            row["slow"] += 1
        else:
            row["good"] += 1
    return [{**row, "goodput": row["good"] / phase_s} for row in found]


def measured(options: argparse.Namespace, load: Load, scratch: Path) -> Iterator[dict[str, Any]]:
    """Every case with the whole trace."""
    trace = scratch / "trace.jsonl"
    write_trace(trace, load, options.phase_s)
    if options.gpus:
        model = write_model(scratch / "model", TINY if options.tiny else QWEN3_4B)
    else:
        model = resolve_model("smollm2-135m")
    said: dict[str, Any] = {
        "model": model,
        "device": "cuda" if options.gpus and not options.tiny else "cpu",
        "strict-roles": True,
        "ttft-target-ms": 1e3 * load.ttft_s,
        "tpot-target-ms": 1e3 * load.tpot_s,
    }
    said |= {"load-format": "dummy"} if options.gpus else {}
    sent: dict[str, Any] = {"tokenizer": model, "workload": "trace", "trace-file": trace}
    sent |= {"no-chunks": True}
    for name, topology, roles in cases(options.static):
        log = scratch / f"{name.replace(' ', '-')}.log"
        server = Serving(topology, {**said, "roles": roles}, log)
        try:
            bench(server.url, {**sent, "trace-until-s": WARM_S, "seed": 1})
            before = log.read_text(errors="replace").count(CHANGED)
            result = bench(server.url, sent)
            changes = log.read_text(errors="replace").count(CHANGED) - before
        finally:
            server.stop()
        phases = by_phase(result, load, options.phase_s)
        good = sum(phase["good"] for phase in phases)
        goodput = good / (len(phases) * options.phase_s)
        print(f"{name}: {goodput:.2f}/s; {json.dumps(phases)}", flush=True)
        yield {"name": name, "goodput": goodput, "changes": changes, "phases": phases}


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=int, choices=(0, 2), default=0)
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU")
    parser.add_argument(
        "--chat",
        type=int,
        nargs="?",
        const=12,
        choices=CHAT_RATES,
        metavar="MS",
        help="W1 and chat with a TTFT of 1 s and this TPOT, on GPUs",
    )
    parser.add_argument("--phases", nargs="+", metavar="LOAD", help="fewer of them, in this order")
    parser.add_argument("--rates", nargs="+", type=float, help="of each phase, for other GPUs")
    parser.add_argument("--tpot-ms", type=float, help="the objective, for other GPUs")
    names = tuple(topologies(2))
    parser.add_argument("--static", nargs="+", choices=names, default=names)
    parser.add_argument("--phase-s", type=float, default=60.0, help="of each phase")
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    on_gpus = options.gpus and not options.tiny
    if options.chat and not on_gpus:
        parser.error("--chat needs --gpus 2 without --tiny: its lengths and rates are for GPUs")
    load = ON_GPUS if on_gpus else ON_CPU
    if options.chat:
        load = chat_on_gpus(options.chat)
    if options.phases:
        if unknown := set(options.phases) - set(load.rates):
            parser.error(f"--phases has {', '.join(sorted(unknown))}: use {', '.join(load.rates)}")
        load = replace(load, rates={phase: load.rates[phase] for phase in options.phases})
    if options.rates:
        if len(options.rates) != len(load.rates):
            parser.error(f"--rates needs {len(load.rates)}, one a phase: {', '.join(load.rates)}")
        if min(options.rates) <= 0:
            parser.error(f"--rates has {min(options.rates):g}: requests a second are more than 0")
        load = replace(load, rates=dict(zip(load.rates, options.rates, strict=True)))
    if options.tpot_ms:
        load = replace(load, tpot_s=options.tpot_ms / 1e3)
    name = "smollm2-135m" if not options.gpus else "tiny" if options.tiny else "qwen3-4b-shape"
    slo = {"ttft_s": load.ttft_s, "tpot_s": load.tpot_s}
    about: dict[str, Any] = {"slo": slo, "phase_s": options.phase_s, "rates": dict(load.rates)}
    runs: list[dict[str, Any]] = []
    static = len(options.static)
    with tempfile.TemporaryDirectory(prefix="tasuki-roles-") as scratch:
        for run in measured(options, load, Path(scratch)):
            runs.append(run)
            found = compared(runs, static) if len(runs) > static else {}
            result = header("roles_follow_served", label="roles", topology=None, model=name)
            # What is measured outlives what comes after it.
            write_result(options.output, {**result, **about, "runs": runs, **found})
    print(json.dumps(found))


if __name__ == "__main__":
    main()
