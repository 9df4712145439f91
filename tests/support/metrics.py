"""A scrape of `/metrics` in a form that tests can ask."""

from __future__ import annotations

import re
from dataclasses import dataclass

_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Sample:
    name: str
    labels: dict[str, str]
    value: float


class Metrics:
    """Samples of one scrape of a Prometheus or OpenMetrics text."""

    def __init__(self, text: str) -> None:
        self.samples: list[Sample] = []
        for line in text.splitlines():
            if line.startswith("#"):
                continue
            if match := _SAMPLE.match(line):
                name, labels, value = match.groups()
                self.samples.append(Sample(name, dict(_LABEL.findall(labels or "")), float(value)))

    def find(self, name: str, **labels: str) -> list[Sample]:
        """Samples of that name that carry these labels (and perhaps others)."""
        return [
            sample
            for sample in self.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]

    def sum(self, name: str, **labels: str) -> float:
        """The sum of `find`.

        Raises:
            KeyError: no such sample: a misspelt name must not pass for zero.
        """
        found = self.find(name, **labels)
        if not found:
            names = sorted({sample.name for sample in self.samples})
            raise KeyError(f"no sample {name} {labels} among {names}")
        return sum(sample.value for sample in found)

    def values(self, label: str, name: str) -> set[str]:
        """The values that a label takes over the samples of one name."""
        return {s.labels[label] for s in self.samples if s.name == name and label in s.labels}
