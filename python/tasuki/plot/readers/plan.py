"""What `tasuki plan --output` writes, schema "tasuki.plan/1"."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tasuki.plot.errors import ResultFileError
from tasuki.plot.readers.fields import Fields
from tasuki.plot.run import Plan, PlanDesign, PlanPoint

_SCHEMA = "tasuki.plan/1"


def recognises(first: dict[str, Any]) -> bool:
    """Whether a file with this object in it is a plan."""
    return str(first.get("schema", "")).startswith("tasuki.plan/")


def read(path: Path, objects: list[dict[str, Any]], label: str) -> Iterator[Plan]:
    """The plans of a file.

    Args:
        path: The file.
        objects: Its JSON objects.
        label: Names the plan.
    """
    for data in objects:
        if data.get("schema") != _SCHEMA:
            raise ResultFileError(
                path, f"schema is {data.get('schema')!r}, this version reads {_SCHEMA!r}"
            )
        fields = Fields(path, data)
        best, slo = fields.inner("best"), fields.inner("slo")
        limits = {key.removesuffix("_s"): slo.number(key) for key in slo.data}
        yield Plan(
            path=path,
            label=label,
            designs=tuple(_design(design) for design in fields.rows("simulated")),
            best=_name(best),
            expected=_point(fields.inner("expected")),
            slo_ms={name: limit * 1e3 for name, limit in limits.items() if limit is not None},
            steps=fields.text("steps"),
        )


def _name(design: Fields) -> str:
    """Designs of one name differ in the size of their steps, of prefill workers first."""
    sizes = design.inner("design")
    tokens = str(sizes.count("max_batched_tokens"))
    if sizes.data.get("prefill_max_batched_tokens") is not None:
        tokens = f"{sizes.count('prefill_max_batched_tokens')}/{tokens}"
    return f"{design.text('name')}, step {tokens}"


def _design(design: Fields) -> PlanDesign:
    points = tuple(_point(probe) for probe in design.rows("probes"))
    return PlanDesign(_name(design), points, design.need("rate"))


def _point(seen: Fields) -> PlanPoint:
    return PlanPoint(
        rate=seen.need("rate"),
        goodput=seen.need("goodput"),
        attainment=seen.need("attainment"),
        ttft_p95_ms=seen.number("ttft_p95_ms"),
        tpot_p95_ms=seen.number("tpot_p95_ms"),
    )
