"""Times the candidates of a model's stages, as they run: residual, norm and gate around the GEMMs.

What is timed goes through several layers' weights, so that none of them is still in a cache
when it is read again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from tasuki.models.dispatch.decide import choose
from tasuki.models.dispatch.table import CHOICES, ROWS, STAGES, Choice, Table, stage_key
from tasuki.models.dispatch.timer import Run, Work, take_turns, timed_run
from tasuki.models.ops import LlamaLayer
from tasuki.models.ops_cuda import CudaOps, dense, plain, stage_of

_COLD_BYTES = 192 << 20  # several times the largest second-level cache


@dataclass(frozen=True, slots=True)
class Cell:
    """One choice to be made: `key` as of `stage_key`, `rows` a bucket."""

    stage: str
    key: str
    rows: int


def cells_of(layer: LlamaLayer) -> list[Cell]:
    """All choices of a model whose layers are like this one, the same in every rank's order."""
    cells = []
    for stage in STAGES:
        first, second = (plain(gemm).weight for gemm in stage_of(stage, layer))
        dtype = str(first.dtype).removeprefix("torch.")
        key = stage_key(stage, tuple(first.shape), tuple(second.shape), dtype)
        cells += [Cell(stage, key, rows) for rows in ROWS]
    return cells


@torch.inference_mode()
def measure(
    ops: CudaOps,
    layers: Sequence[LlamaLayer],
    table: Table,
    deadline_s: float,
    prepare: Callable[[Work, torch.device], Run] = timed_run,
    on_times: Callable[[Cell, dict[str, list[float]]], None] = lambda _cell, _times: None,
) -> int:
    """Add to `table` what it lacks.

    Args:
        ops: Computes the candidates.
        layers: The model's, on one device.
        table: Changed.
        deadline_s: By `time.monotonic`; no measurement begins after it.
        prepare: Makes a candidate's work ready to be timed.
        on_times: Told the seconds of each candidate, turn by turn.

    Returns:
        How many choices are still missing.
    """
    missing = [cell for cell in cells_of(layers[0]) if not table.has(cell.key, cell.rows)]
    while missing and time.monotonic() < deadline_s:
        cell = missing.pop()
        table.set(cell.key, cell.rows, _decide(ops, layers, cell, prepare, on_times))
    return len(missing)


def _decide(
    ops: CudaOps,
    layers: Sequence[LlamaLayer],
    cell: Cell,
    prepare: Callable[[Work, torch.device], Run],
    on_times: Callable[[Cell, dict[str, list[float]]], None],
) -> Choice:
    first, second = stage_of(cell.stage, layers[0])
    default = ops.default(first, second, cell.rows)
    able = [choice for choice in CHOICES if ops.can(choice, first, second, cell.rows)]
    device = plain(first).weight.device
    runs = {
        str(choice): prepare(_work(ops, choice, layers, cell), device)
        for choice in dict.fromkeys([default, *able])
    }
    times = take_turns(runs)
    on_times(cell, times)
    chosen = choose(times, str(default))
    return next(choice for choice in (default, *able) if str(choice) == chosen)


def weights_read(layers: Sequence[LlamaLayer], cell: Cell) -> int:
    """How many layers' weights a candidate's work goes through."""
    of_one = sum(plain(gemm).weight.nbytes for gemm in stage_of(cell.stage, layers[0]))
    return min(len(layers), max(2, -(-_COLD_BYTES // of_one)))


def _work(ops: CudaOps, choice: Choice, layers: Sequence[LlamaLayer], cell: Cell) -> Work:
    """A stage of some layers, one after another; no sum over ranks, which is the same for all."""
    first = plain(stage_of(cell.stage, layers[0])[0]).weight
    own = [
        (layer, plain(layer.output), replace(dense(layer), down=plain(dense(layer).down)))
        for layer in layers[: weights_read(layers, cell)]
    ]
    x = first.new_empty(cell.rows, first.shape[1]).normal_()
    hidden = first.new_empty(cell.rows, first.shape[0]).normal_()

    def mlp() -> None:
        for layer, output, part in own:
            ahead = ops.add(choice, output, x, hidden, layer.mlp_norm)
            ops.use_gate_up(choice, part, layer.mlp_norm, hidden, ahead)

    def attention() -> None:
        for layer, _, part in own:
            ahead = ops.add(choice, part.down, x, hidden, layer.attention_norm)
            ops.use_qkv(choice, layer, hidden, ahead)

    return mlp if cell.stage == "mlp" else attention
