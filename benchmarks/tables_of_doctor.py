"""The table of RESULTS.md about `tasuki doctor`."""

from __future__ import annotations

from collections.abc import Callable

from table_parts import Result, load, rows, source


def doctor(file: str) -> Callable[[], str]:
    """Found, not found, false alarms."""
    return lambda: _table(file)


def _table(file: str) -> str:
    cases = load(file)["cases"]
    heads = ("fleet", "state", "check", "result", "same fault, by other checks", "false alarms")
    faults = [case for case in cases if case["finds"]]
    healthy = [case for case in cases if not case["finds"]]
    total = (
        f"\n\n{sum(case['found'] for case in faults)} of {len(faults)} faults found; false alarms"
        f" in {sum(bool(case['other_findings']) for case in healthy)} of {len(healthy)} healthy"
        f" states and beside {sum(bool(case['other_findings']) for case in faults)} of the faults."
    )
    return source(file) + rows(heads, map(_line, cases)) + total


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
