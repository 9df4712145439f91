"""What a profiler's trace says of a GPU: which kernels ran for how long, and how busy it was."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

_NAME_LENGTH = 90


@dataclass(frozen=True, slots=True)
class KernelTime:
    """One kernel's part of a trace, per run of the work."""

    name: str
    calls: float
    ms: float


@dataclass(frozen=True, slots=True)
class Trace:
    """Of `runs` runs of some work.

    Attributes:
        busy: share of the time, from the first kernel's begin to the last one's
            end, in which a kernel or a copy ran.
        ms: that time, per run.
        kernels: the longest first.
    """

    busy: float
    ms: float
    kernels: list[KernelTime]

    def to_json(self) -> dict[str, Any]:
        """As result files hold it."""
        return asdict(self)


def trace(work: Callable[[], object], runs: int, top: int = 15) -> Trace:
    """Profile `runs` runs of `work` on the current CUDA device."""
    work()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(runs):
            work()
        torch.cuda.synchronize()
    spans = [
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiler.events()
        if event.device_type == DeviceType.CUDA
    ]
    return summarise(spans, runs, top)


def summarise(spans: list[tuple[float, float, str]], runs: int, top: int) -> Trace:
    """Sum up (begin, end, name) in microseconds; spans may overlap."""
    if not spans:
        return Trace(0.0, 0.0, [])
    times: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    busy, reached = 0.0, min(begin for begin, _, _ in spans)
    first = reached
    for begin, end, name in sorted(spans):
        times[name] += end - begin
        calls[name] += 1
        busy += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    longest = sorted(times, key=lambda name: -times[name])[:top]
    kernels = [
        KernelTime(name[:_NAME_LENGTH], calls[name] / runs, times[name] / 1e3 / runs)
        for name in longest
    ]
    whole = reached - first
    return Trace(busy / whole if whole else 0.0, whole / 1e3 / runs, kernels)
