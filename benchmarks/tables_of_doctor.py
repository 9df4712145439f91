"""The table of RESULTS.md about `tasuki doctor`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from table_parts import Result, load, rows, source

TASUKI = ("doctor", "doctor_mixed", "doctor_routing", "doctor_faults")
VLLM = ("doctor_vllm_colocated", "doctor_vllm_settings")


def doctor(*files: str) -> Callable[[], str]:
    """Found, not found, false alarms."""
    return lambda: _table(files)


def _table(files: Sequence[str]) -> str:
    results = [load(name) for name in files]
    lines = [_line(case) for result in results for case in result["cases"]]
    heads = ("fleet", "state", "check", "result", "same fault, by other checks", "false alarms")
    counts = {
        key: sum(result["summary"][key] for result in results) for key in results[0]["summary"]
    }
    total = (
        f"\n\n{counts['found']} of {counts['faults']} faults found; false alarms in"
        f" {counts['accused']} of {counts['healthy']} healthy states and beside"
        f" {counts['other_findings_beside_faults']} of the faults."
    )
    return "".join(map(source, files)) + rows(heads, lines) + total


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
