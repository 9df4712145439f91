"""Open loops that were measured, simulated by this revision.

    python benchmarks/simulated_again.py

Needs no GPU: result files of `plan_regret.py` hold each run's figures, the simulated ones of their
own revision, and the step table by which those were found. The same loads are simulated from the
same tables, and by the newest one, which has steps of 48 sequences and of 2,048 tokens too, and how
early steps are planned. Tables from before `decode_rows` get the rows that workers of their
revisions recorded CUDA graphs for, which were the same.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from candidates import GPU_LOADS, Design, simulate
from plan_regret import SEED, number_of
from programs import ROOT

from tasuki.bench.header import header, write_result
from tasuki.execution.cuda_graphs import buckets_up_to
from tasuki.processor import usable_cores

RESULTS = ROOT / "benchmarks" / "results"
RESULT = RESULTS / "simulated_again.json"
NAMES = ("open_loop_2xh200_w1", "open_loop_2xh200_chat", "plan_regret_2xh200_w1")  # of seeds as now
FINER = "open_loop_1xh200"  # has a table of the same kind of GPU
DESIGN = re.compile(r"([\dpdm]+)(?: (strict))?(?: (\d+))?(?: ([\d.]+)ms)?")


def design_named(name: str) -> Design | None:
    """What has this name; None: it is not simulated."""
    found = DESIGN.fullmatch(name)
    if found is None:
        return None
    counts, strict, chunk, itl_ms = found.groups()
    by_role = {role: int(count) for count, role in re.findall(r"(\d+)([pdm])", counts)}
    prefill, decode, mixed = (by_role.get(role, 0) for role in "pdm")
    itl = None if itl_ms is None else float(itl_ms)
    return Design(prefill, decode, mixed, 1, bool(strict), int(chunk) if chunk else None, None, itl)


def seconds_of(command: list[str]) -> float:
    """How long each run lasted, by the command that measured it."""
    return float(command[command.index("--seconds") + 1]) if "--seconds" in command else 20.0


def table(name: str, folder: Path) -> Path:
    """The step table of a result file."""
    steps = json.loads((RESULTS / f"{name}.json").read_text())["steps"]
    rows = buckets_up_to(max(int(row["batch"]) for row in steps["decode"]))
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"decode_rows": rows, **steps}))
    return path


def again(name: str, folder: Path) -> Iterator[dict[str, Any]]:
    """The runs of a file."""
    file = json.loads((RESULTS / f"{name}.json").read_text())
    tables = {"again": table(name, folder), "finer": table(FINER, folder)}
    seconds = seconds_of(file["command"])

    def one(run: Mapping[str, Any]) -> dict[str, Any] | None:
        design = design_named(run["design"])
        if design is None or "simulated" not in run:
            return None
        load = {**GPU_LOADS[run["load"]], "request-rate": run["rate"], "duration-s": seconds}
        load["seed"] = SEED + number_of(run["rate"])
        found = {way: simulate(design, path, load)["metrics"] for way, path in tables.items()}
        kept = {key: run[key] for key in ("load", "design", "rate")}
        return {
            "file": name,
            **kept,
            "in_time": run["measured"]["loose"]["attainment"],
            **{way: _latencies(run[way]) for way in ("measured", "simulated")},
            **{way: _latencies(metrics) for way, metrics in found.items()},
        }

    with ThreadPoolExecutor(usable_cores()) as threads:
        yield from (found for found in threads.map(one, file["runs"]) if found is not None)


def _latencies(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {
        f"{kind}_{part}_ms": metrics[f"{kind}_ms"][part]
        for kind in ("ttft", "tpot")
        for part in ("median", "p95")
    }


def main() -> None:
    """Simulate, write the result, print it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        for name in NAMES:
            for run in again(name, Path(folder)):
                print(json.dumps(run), flush=True)
                runs.append(run)
    described = header("simulated_again", label="again", topology=None, model="qwen3-4b-shape")
    write_result(options.output, {**described, "runs": runs})


if __name__ == "__main__":
    main()
