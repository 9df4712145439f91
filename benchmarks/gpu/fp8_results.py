"""What `fp8.py` finds: its parts' results, what failed in them, and a table of it all."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class Results:
    """What was found, and the time left."""

    deadline_s: float
    checks: list[dict[str, Any]] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)
    gemms: list[dict[str, Any]] = field(default_factory=list)
    traces: dict[str, Any] = field(default_factory=dict)
    logits: list[dict[str, Any]] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """What was found."""
        return {name: value for name, value in vars(self).items() if name != "deadline_s"}

    def add(self, found: dict[str, Any]) -> None:
        """What another process found."""
        for name, value in found.items():
            held = getattr(self, name)
            if isinstance(held, list):
                held.extend(value)
            else:
                held.update(value)

    @contextmanager
    def noting(self, what: str) -> Iterator[None]:
        """Let what fails be known, and the rest go on."""
        if time.monotonic() > self.deadline_s:
            self.failed[what] = "no time left"
            raise TimeoutError
        try:
            yield
        except Exception as error:
            first = (str(error).splitlines() or [""])[0]
            self.failed[what] = f"{type(error).__name__}: {first}"
            print(f"FAILED {what}: {self.failed[what]}", file=sys.stderr, flush=True)


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    """Distance over length, in float32."""
    return float((got.float() - want.float()).norm() / want.float().norm())


def report(results: Results) -> str:
    """A short table."""
    lines = []
    if results.checks:
        lines.append(f"largest error of a GEMM: {max(c['error'] for c in results.checks):.5f}")
    lines += [f"    {c}" for c in results.checks if not c["error"] < 0.01]
    for name, found in results.traces.items():
        lines.append(f"{name}: busy {found['busy']:.1%} of {found['ms']:.3f} ms")
        lines += [
            f"    {k['ms']:7.3f} ms {k['calls']:6.1f} x {k['name'][:60]}"
            for k in found["kernels"][:7]
        ]
    for each in results.gemms:
        lines.append(f"{each['gemm']:8} {each['rows']:5} {each['way']:16} {each['us']:9.2f} us")
    lines += [f"logits {each}" for each in results.logits]
    lines += [f"FAILED {what}: {why}" for what, why in results.failed.items()]
    for s in results.steps:
        lines.append(f"{s['rows']:3} x {s['context']}, {s['step']:24} {s['ms']:7.3f} ms")
    return "\n".join(lines)
