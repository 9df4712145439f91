"""What a check says: what it looked at, what is wrong, and what it could not see."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tasuki.errors import TasukiError

HEALTHY, FOUND, COULD_NOT_LOOK = 0, 1, 2


class DoctorError(TasukiError):
    """Nothing could be looked at."""

    exit_code = COULD_NOT_LOOK


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is wrong.

    Attributes:
        what: One sentence.
        evidence: Numbers, each with the metric or the answer that it comes from.
        remedy: One thing to do.
        workers: Names of those that it concerns; empty: the fleet.
        figures: Numbers behind the evidence, in the units that their names end with.
    """

    what: str
    evidence: tuple[str, ...]
    remedy: str
    workers: tuple[str, ...] = ()
    figures: Mapping[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Outcome:
    """What one check came to. With nothing looked at and nothing unseen it did not apply.

    Attributes:
        looked_at: What it judged, in words.
        unseen: What it needs and the fleet does not show, each with the way to show it.
    """

    looked_at: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)
