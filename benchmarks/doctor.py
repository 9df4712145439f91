"""Whether `tasuki doctor` finds what is wrong, and only that.

    python benchmarks/doctor.py                  all
    python benchmarks/doctor.py --only mixed     fleets whose name has one of these words

Each fleet is real, with a tiny model. It is brought into one state after the other: healthy
ones under several loads, and one fault at a time (`tests/support/fleet_cases.py`). The table says
for each state what had to be found, whether it was, and what else was found. Writes
benchmarks/results/doctor.json; fails if a fault was not found or a healthy fleet was accused.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from programs import ROOT

sys.path.append(str(ROOT / "tests"))
from support.deployment import Deployment
from support.fleet_cases import ALL, FleetCases, look
from support.models import save_tiny_model

from tasuki.bench.header import header, write_result

RESULT = ROOT / "benchmarks" / "results" / "doctor.json"


def row(
    fleet: str, name: str, finds: str, also: Sequence[str], seen: dict[str, Any], took_s: float
) -> dict[str, Any]:
    """One line of the table."""
    by_check: dict[str, list[str]] = {}
    for finding in seen["findings"]:
        by_check.setdefault(finding["check"], []).append(finding["what"])
    return {
        "fleet": fleet,
        "case": name,
        "finds": finds,
        "found": not finds or finds in by_check,
        "other_findings": {
            check: said for check, said in by_check.items() if check not in (finds, *also)
        },
        "same_fault": {check: said for check, said in by_check.items() if check in (finds, *also)},
        "exit_status": seen["exit_status"],
        "seconds": round(took_s, 1),
    }


def fleet_rows(fleet: FleetCases, model: Path) -> Iterator[dict[str, Any]]:
    """One fleet, in all its states."""
    before = dict(os.environ)
    os.environ.update(fleet.environment)
    with tempfile.TemporaryDirectory() as folder:
        deployment = Deployment.launch(fleet.options(model, Path(folder)), Path(folder))
        try:
            for case in fleet.cases:
                began = time.monotonic()
                with case.act(deployment):
                    seen = look(deployment, *case.arguments)
                took_s = time.monotonic() - began
                yield row(fleet.name, case.name, case.finds, case.also, seen, took_s)
        finally:
            deployment.destroy()
            os.environ.clear()
            os.environ.update(before)


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
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    fleets = [fleet for fleet in ALL if any(word in fleet.name for word in options.only)]
    if not fleets:
        parser.error(f"--only is {options.only!r}: no fleet of {[each.name for each in ALL]}")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        model = save_tiny_model(Path(folder) / "tiny")
        for fleet in fleets:
            for one in fleet_rows(fleet, model):
                rows.append(one)
                say(one)
                summary = write(options.output, rows)
    print(summary)
    if summary["found"] < summary["faults"] or summary["accused"]:
        sys.exit("not all faults were found, or a healthy fleet was accused")


def write(path: Path, rows: Sequence[dict[str, Any]]) -> dict[str, int]:
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
    write_result(path, {**head, "summary": summary, "cases": list(rows)})
    return summary


if __name__ == "__main__":
    main()
