"""What a check found, as data, and what all of them mean together."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

from tasuki.errors import TasukiError

EXIT_CODE = 78  # EX_CONFIG of sysexits.h: another start would find the same

Status = Literal["ok", "warn", "fail"]


class PreflightError(TasukiError):
    """The machine is not fit to serve; the process exits with `EXIT_CODE`."""

    exit_code = EXIT_CODE


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: Stable, for machines.
        status: `warn`: it serves, but slowly or not for sure.
        found: The actual value.
        expected: The limit; empty where the status is `ok`.
        remedy: One thing to do; empty where the status is `ok`.
        figures: Numbers behind `found`, in SI units that their names end with.
    """

    name: str
    status: Status
    found: str
    expected: str = ""
    remedy: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)


def ok(name: str, found: str, **figures: float) -> Check:
    """All is well."""
    return Check(name, "ok", found, figures=figures)


def warn(name: str, found: str, expected: str, remedy: str, **figures: float) -> Check:
    """It serves, but slowly or not for sure."""
    return Check(name, "warn", found, expected, remedy, figures)


def fail(name: str, found: str, expected: str, remedy: str, **figures: float) -> Check:
    """It does not serve."""
    return Check(name, "fail", found, expected, remedy, figures)


def failures(checks: Sequence[Check]) -> list[Check]:
    """Those that end a start."""
    return [check for check in checks if check.status == "fail"]


def as_json(checks: Sequence[Check]) -> str:
    """All checks, for machines."""
    return json.dumps({"checks": [asdict(check) for check in checks]}, indent=2)


def as_table(checks: Sequence[Check]) -> str:
    """All checks, one a line; below what is not well, what was expected and what to do."""
    width = max((len(check.name) for check in checks), default=0)
    lines = []
    for check in checks:
        lines.append(f"{check.status:<4}  {check.name:<{width}}  {check.found}")
        if check.status != "ok":
            lines.append(f"{'':6}{'':<{width}}  expected: {check.expected}")
            lines.append(f"{'':6}{'':<{width}}  remedy: {check.remedy}")
    return "\n".join(lines)


def as_line(check: Check) -> str:
    """One check in one line, for logs."""
    return f"{check.name}: {check.found}; expected {check.expected}: {check.remedy}"
