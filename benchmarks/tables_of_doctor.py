"""The table of RESULTS.md about `tasuki doctor`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from table_parts import Result, load, rows, source

TASUKI = ("doctor",)
VLLM = ("doctor_vllm", "doctor_vllm_colocated", "doctor_vllm_settings", "doctor_vllm_layout")


def doctor(*files: str) -> Callable[[], str]:
    """Found, not found, false alarms."""
    return lambda: _table(files)


def _table(files: Sequence[str]) -> str:
    fleets: dict[str, list[Result]] = {}
    for result in map(load, files):  # a fleet that is in several files: as in the last one
        names = dict.fromkeys(case["fleet"] for case in result["cases"])
        fleets |= {n: [case for case in result["cases"] if case["fleet"] == n] for n in names}
    cases = [case for fleet in fleets.values() for case in fleet]
    heads = ("fleet", "state", "check", "result", "same fault, by other checks", "false alarms")
    faults = [case for case in cases if case["finds"]]
    healthy = [case for case in cases if not case["finds"]]
    total = (
        f"\n\n{sum(case['found'] for case in faults)} of {len(faults)} faults found; false alarms"
        f" in {sum(bool(case['other_findings']) for case in healthy)} of {len(healthy)} healthy"
        f" states and beside {sum(bool(case['other_findings']) for case in faults)} of the faults."
    )
    return "".join(map(source, files)) + rows(heads, map(_line, cases)) + total


def _line(case: Result) -> list[str]:
    found = "found" if case["found"] else "NOT FOUND"
    same = [check for check in case["same_fault"] if check != case["finds"]]
    return [
        case["fleet"],
        case["case"],
        case["finds"] or "-",
        found if case["finds"] else "nothing to find",
        ", ".join(same) or "-",
        ", ".join(case["other_findings"]) or "-",
    ]
