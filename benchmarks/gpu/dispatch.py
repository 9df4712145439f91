"""Measured dispatch on one GPU: each candidate's time, and what the choices make of a decode step.

    python benchmarks/gpu/dispatch.py    about a minute

Random weights in the shape of Qwen3-4B. `us` is the time of a stage (models/dispatch/table.py)
of one layer in a CUDA graph, the median of the turns. The steps are whole decode steps with
greedy choice in a CUDA graph, default and measured in turns, medians of each.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from dummy import dummy_model
from step_bench import Bench, Work

from tasuki.bench.header import header, own_command, write_result
from tasuki.execution.recorder import CudaRecorder
from tasuki.execution.sampler import greedy
from tasuki.models.dispatch.measure import Cell, measure, weights_read
from tasuki.models.dispatch.store import facts_of
from tasuki.models.dispatch.table import Table
from tasuki.models.llama import LlamaModel
from tasuki.models.ops_cuda import CudaOps

REPOSITORY = Path(__file__).resolve().parents[2]
RESULT = REPOSITORY / "benchmarks" / "results" / "gpu_dispatch.json"
ROWS = (1, 2, 8, 16, 32, 64, 96, 128)


def choices(model: LlamaModel, table: Table) -> list[dict[str, Any]]:
    """Fill the table; the times of all candidates."""
    rows: list[dict[str, Any]] = []
    begin_s = time.monotonic()

    def told(cell: Cell, times_s: dict[str, list[float]]) -> None:
        layers = weights_read(model.layers, cell)
        us = {name: 1e6 * statistics.median(own) / layers for name, own in times_s.items()}
        rows.append({"stage": cell.stage, "rows": cell.rows, "default": next(iter(us)), "us": us})
        listed = ", ".join(f"{name} {value:.1f}" for name, value in us.items())
        print(f"{cell.stage:9} {cell.rows:4} rows (us a layer; the default first): {listed}")

    ops = model.ops
    assert isinstance(ops, CudaOps)
    measure(ops, model.layers, table, begin_s + 120.0, on_times=told)
    print(f"measured in {time.monotonic() - begin_s:.1f} s")
    for row in rows:
        row["seconds"] = time.monotonic() - begin_s
    return rows


def step(
    bench: Bench, model: LlamaModel, rows: int, context: int
) -> tuple[Callable[[], object], object]:
    """A decode step in a graph, with the table that the model has now, and what it reads."""
    attention = bench.attention(16)
    batch = bench.batch(Work("decode", (context,) * rows), 16, graph=True)

    def forward() -> tuple[torch.Tensor, torch.Tensor]:
        logits = model.forward(batch, attention)
        return logits, greedy(logits)

    attention.plan(batch)
    return CudaRecorder().record(forward)[0], (attention, batch)


def compare(bench: Bench, model: LlamaModel, table: Table, context: int, turns: int) -> Any:
    """Decode steps by the default and by the table."""
    found = []
    ops = model.ops
    assert isinstance(ops, CudaOps)
    for rows in ROWS:
        runs, read = {}, []
        for name, used in (("default", Table()), ("measured", table)):
            ops.table = used
            runs[name], buffers = step(bench, model, rows, context)
            read.append(buffers)  # or the next graph would take their memory
        times: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(turns):
            for name, run in runs.items():
                times[name].append(bench.device_ms(run))
        ms = {name: statistics.median(own) for name, own in times.items()}
        found.append({"rows": rows, "context": context, "ms": ms, "turns_ms": times})
        print(f"decode step of {rows:3}: default {ms['default']:.3f} ms, ", end="")
        print(f"measured {ms['measured']:.3f} ms", flush=True)
    return found


def main() -> None:
    """Measure, write the result file, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--context", type=int, default=770)
    parser.add_argument("--pool-tokens", type=int, default=131_072)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULT)
    args = parser.parse_args()
    device = torch.device("cuda")
    model = dummy_model(device, tiny=False)
    assert isinstance(model, LlamaModel)
    bench, table = Bench(model, device, args.pool_tokens), Table()
    with torch.inference_mode():
        timed = choices(model, table)
        steps = compare(bench, model, table, args.context, args.turns)
    described = header(
        "gpu_dispatch", command=own_command(), label="dispatch", topology=None, model="Qwen3-4B"
    )
    result = {"facts": facts_of(device), "choices": table.to_json(), "timed": timed, "steps": steps}
    write_result(args.output, described | result)
    print(table.to_json(), file=sys.stderr)


if __name__ == "__main__":
    main()
