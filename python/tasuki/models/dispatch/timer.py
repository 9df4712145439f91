"""Times candidates in turns: each once, then each again, so that a drift concerns all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch

Work = Callable[[], object]
Run = Callable[[], float]
"""Runs the work once, or several times, and returns the seconds of one."""

TURNS = 3
_WARM_UPS = 2
_REPEATS = 4


def timed_run(work: Work, device: torch.device) -> Run:
    """Prepare `work` to be timed: on CUDA in a graph, as it runs when it serves."""
    for _ in range(_WARM_UPS):
        work()
    if device.type != "cuda":
        return lambda: _on_host(work)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    # "thread_local": what the transport's threads do on the device is not our work.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        work()
    return lambda: _of_graph(graph)


def take_turns(runs: Mapping[str, Run], turns: int = TURNS) -> dict[str, list[float]]:
    """Seconds of each, `turns` times; all are run once before."""
    for run in runs.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(turns):
        for name, run in runs.items():
            times[name].append(run())
    return times


def _on_host(work: Work) -> float:
    begin_s = time.perf_counter()
    work()
    return time.perf_counter() - begin_s


def _of_graph(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(_REPEATS):
        graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / _REPEATS
