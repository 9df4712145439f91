"""Pictures of fleets, made by hand for the checks of `tasuki doctor`."""

from __future__ import annotations

from collections.abc import Mapping

from tasuki.doctor.checks import CHECKS
from tasuki.doctor.picture import Engine, Fleet, Role, Scrapes, Worker


def scrapes(*moments: Mapping[str, float], gap_s: float = 2.0) -> Scrapes:
    """Values at moments that are so far apart."""
    found = Scrapes()
    for number, values in enumerate(moments):
        found.add(number * gap_s, values)
    return found


def worker(
    name: str, *moments: Mapping[str, float], engine: Engine = "vllm", role: Role = ""
) -> Worker:
    """A worker that shows these values."""
    return Worker(name, engine, role, "m", scrapes=scrapes(*moments))


def found(check: str, fleet: Fleet) -> list[str]:
    """What a check finds, in words."""
    return [finding.what for finding in CHECKS[check](fleet).findings]


def unseen(check: str, fleet: Fleet) -> str:
    return "\n".join(CHECKS[check](fleet).unseen)
