"""Whether `tasuki doctor` finds what is wrong, and only that.

    python benchmarks/doctor.py                  all
    python benchmarks/doctor.py --only mixed     fleets whose name has one of these words
    python benchmarks/doctor.py --vllm VENV/bin/vllm     fleets of vLLM servers on the CPU

Each fleet is real, with a tiny model. It is brought into one state after the other: healthy
ones under several loads, and one fault at a time (`tests/support/fleet_cases.py`,
`vllm_cases.py`). The table says for each state what had to be found, whether it was, and what
else was found. Writes benchmarks/results/doctor.json or doctor_vllm.json; fails if a fault was not
found or a healthy fleet was accused.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from programs import ROOT

sys.path.append(str(ROOT / "tests"))
from support.deployment import Deployment
from support.fleet_cases import ALL, Case, look
from support.models import save_model_for_vllm, save_tiny_model
from support.vllm_cases import ALL as ALL_OF_VLLM
from support.vllm_cases import look_at_vllm

from tasuki.bench.header import header, write_result

RESULTS = ROOT / "benchmarks" / "results"
_VERSIONS = """
from importlib.metadata import version
print(*(f"{name}={version(name)}" for name in ("vllm", "torch", "nixl", "transformers")))
"""

Fleet = tuple[
    str,
    Sequence[Case[Any]],
    Callable[[Path], AbstractContextManager[Any]],
    Callable[[Any, Case[Any]], dict[str, Any]],
]
"""Name, states, what starts it in a folder, what looks at it."""


def row(fleet: str, case: Case[Any], seen: dict[str, Any], took_s: float) -> dict[str, Any]:
    """One line of the table."""
    finds, also = case.finds, case.also
    by_check: dict[str, list[str]] = {}
    for finding in seen["findings"]:
        by_check.setdefault(finding["check"], []).append(finding["what"])
    return {
        "fleet": fleet,
        "case": case.name,
        "finds": finds,
        "found": not finds or any(case.says in said for said in by_check.get(finds, ())),
        "other_findings": {
            check: said for check, said in by_check.items() if check not in (finds, *also)
        },
        "same_fault": {check: said for check, said in by_check.items() if check in (finds, *also)},
        "exit_status": seen["exit_status"],
        "seconds": round(took_s, 1),
    }


def look_at_tasuki(deployment: Deployment, case: Case[Deployment]) -> dict[str, Any]:
    """`tasuki doctor` at the router and its workers."""
    return look(deployment, *case.arguments)


def fleets_of_tasuki(model: Path) -> Iterator[Fleet]:
    """Tasuki's own."""
    for each in ALL:
        yield each.name, each.cases, partial(each.running, model), look_at_tasuki


def fleets_of_vllm(vllm: Path, model: Path) -> Iterator[Fleet]:
    """Real vLLM servers behind a router of Tasuki."""
    for each in ALL_OF_VLLM:
        yield each.name, each.cases, partial(each.running, vllm, model), look_at_vllm


def fleet_rows(fleet: Fleet, logs: Path | None) -> Iterator[dict[str, Any]]:
    """One fleet, in all its states."""
    name, cases, running, looked_at = fleet
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) if logs is None else logs / name.replace(" ", "-")
        folder.mkdir(parents=True, exist_ok=True)
        with running(folder) as live:
            for case in cases:
                began = time.monotonic()
                with case.act(live):
                    seen = looked_at(live, case)
                if logs is not None:
                    (folder / f"{case.name}.json").write_text(json.dumps(seen, indent=1))
                yield row(name, case, seen, time.monotonic() - began)


def say(one: dict[str, Any]) -> None:
    """A line for whoever watches."""
    verdict = "found" if one["finds"] else "healthy"
    if not one["found"]:
        verdict = "NOT FOUND"
    more = f"  FALSE: {one['other_findings']}" if one["other_findings"] else ""
    print(f"{one['seconds']:6.1f} s  {verdict:<9}  {one['finds'] or '-':<18}  {one['case']}{more}")
    sys.stdout.flush()


def main() -> None:
    """Runs the fleets, prints the table, writes the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[""], help="words of fleets' names")
    parser.add_argument("--output", type=Path, help="[benchmarks/results/doctor[_vllm].json]")
    parser.add_argument("--vllm", type=Path, help="the vllm program: of a CPU build with nixl")
    parser.add_argument("--logs", type=Path, help="folder that keeps the logs [none]")
    options = parser.parse_args()
    output = options.output or RESULTS / ("doctor_vllm.json" if options.vllm else "doctor.json")
    versions = versions_of(options.vllm) if options.vllm else {}
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "tiny"
        if options.vllm:
            known = list(fleets_of_vllm(options.vllm.absolute(), save_model_for_vllm(model)))
        else:
            known = list(fleets_of_tasuki(save_tiny_model(model)))
        fleets = [fleet for fleet in known if any(word in fleet[0] for word in options.only)]
        if not fleets:
            parser.error(f"--only is {options.only!r}: no fleet of {[each[0] for each in known]}")
        for fleet in fleets:
            for one in fleet_rows(fleet, options.logs):
                rows.append(one)
                say(one)
                summary = write(output, rows, versions)
    print(summary)
    if summary["found"] < summary["faults"] or summary["accused"]:
        sys.exit("not all faults were found, or a healthy fleet was accused")


def versions_of(vllm: Path) -> dict[str, str]:
    """What the servers run."""
    command = [str(vllm.with_name("python")), "-c", _VERSIONS]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return dict(word.split("=", 1) for word in said.split())


def write(path: Path, rows: Sequence[dict[str, Any]], servers: dict[str, str]) -> dict[str, int]:
    """Writes what there is so far, after each state; the summary of it."""
    faults = [one for one in rows if one["finds"]]
    healthy = [one for one in rows if not one["finds"]]
    summary = {
        "faults": len(faults),
        "found": sum(one["found"] for one in faults),
        "healthy": len(healthy),
        "accused": sum(bool(one["other_findings"]) for one in healthy),
        "other_findings_beside_faults": sum(bool(one["other_findings"]) for one in faults),
    }
    head = header("doctor", label="tasuki doctor", topology=None, model="tiny llama")
    more = {"servers": servers} if servers else {}
    write_result(path, {**head, **more, "summary": summary, "cases": list(rows)})
    return summary


if __name__ == "__main__":
    main()
