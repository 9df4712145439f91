"""Prometheus and OpenMetrics texts, and sums of their series."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client import parser
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.samples import Sample

__all__ = ["Sample", "Series", "labels_of", "parse", "read"]


@dataclass(frozen=True, slots=True)
class Series:
    """Where a value of ours stands in an engine's metrics.

    Attributes:
        name: Of the samples, with `_total`, `_sum` or `_count`.
        labels: That they must have.
        how: Of several samples (ranks, paths): their sum, mean or greatest.
        scale: Our unit in theirs.
    """

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    how: str = "sum"
    scale: float = 1.0

    def __str__(self) -> str:
        inside = ",".join(f'{key}="{value}"' for key, value in self.labels.items())
        return f"{self.name}{{{inside}}}" if inside else self.name

    def fits(self, sample: Sample) -> bool:
        """Whether it is one of these samples. A label value with `*` at its end is a beginning."""
        return sample.name == self.name and all(
            _fits(sample.labels.get(key, ""), value) for key, value in self.labels.items()
        )


def _fits(actual: str, wanted: str) -> bool:
    return actual.startswith(wanted[:-1]) if wanted.endswith("*") else actual == wanted


def parse(text: str, content_type: str = "") -> list[Sample]:
    """All samples of an answer of `/metrics`.

    Raises:
        ValueError: It is neither format.
    """
    if "openmetrics" in content_type:
        families = openmetrics.text_string_to_metric_families(text)  # type: ignore[no-untyped-call]
    else:
        families = parser.text_string_to_metric_families(text)
    return [sample for family in families for sample in family.samples]


def read(
    samples: Iterable[Sample], table: Mapping[str, Sequence[Series]]
) -> tuple[dict[str, float], dict[str, str]]:
    """Values by our names, and what they are called there.

    Args:
        samples: Of one scrape.
        table: For each value the series that have it: the first that is there counts.
    """
    by_name: dict[str, list[Sample]] = {}
    for sample in samples:
        by_name.setdefault(sample.name, []).append(sample)
    values, sources = {}, {}
    for name, choices in table.items():
        for series in choices:
            found = [each.value for each in by_name.get(series.name, ()) if series.fits(each)]
            found = [value for value in found if math.isfinite(value)]
            if not found:
                continue
            total = max(found) if series.how == "max" else sum(found)
            values[name] = series.scale * (total / len(found) if series.how == "mean" else total)
            sources[name] = str(series)
            break
        else:
            # A counter has a label's samples from the first event on: until then it is 0.
            for series in choices:
                if series.labels and series.name.endswith("_total") and series.name in by_name:
                    values[name], sources[name] = 0.0, str(series)
                    break
    return values, sources


def labels_of(samples: Iterable[Sample], name: str) -> dict[str, str]:
    """The labels of the first sample of a name; empty: there is none."""
    for sample in samples:
        if sample.name == name:
            return dict(sample.labels)
    return {}
