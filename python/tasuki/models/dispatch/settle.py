"""The choices that all ranks of a worker run with: asked for, kept from before, or measured now."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import torch

from tasuki.execution.collective import Collective
from tasuki.models import cache
from tasuki.models.base import CausalModel
from tasuki.models.dispatch.measure import cells_of, measure
from tasuki.models.dispatch.store import facts_of, load, path_of, store
from tasuki.models.dispatch.table import CHOICES, DispatchError, Table
from tasuki.models.layers import PlainLinear
from tasuki.models.llama import LlamaModel
from tasuki.models.ops_cuda import CudaOps, gemms_of, part_of

log = logging.getLogger(__name__)

BUDGET_S = 4.0
"""Of one start; what it is not enough for is measured at the next one."""


def settle(model: CausalModel, wanted: str, collective: Collective) -> None:
    """Choose what computes the GEMMs of `model`, alike on all ranks; call it on all of them.

    Args:
        model: Loaded; one without kernels of ours, or with experts, keeps the default, and says so.
        wanted: `default`, `measured`, or a file that the latter wrote.
        collective: Joins the ranks.

    Raises:
        DispatchError: The file cannot be used.
    """
    if wanted == "default":
        return
    given = None if wanted == "measured" else load(Path(wanted))
    if not isinstance(model, LlamaModel) or not isinstance(ops := model.ops, CudaOps):
        log.info("dispatch: the default, as only the Llama family on a GPU has choices")
        return
    if model.spec.experts is not None:
        log.info("dispatch: the default, as layers with experts have no choices")
        return
    if not all(isinstance(part_of(gemm), PlainLinear) for gemm in gemms_of(model.layers[0])):
        log.info("dispatch: the default, as weights are fp8")
        return
    if given is not None:
        ops.table = given
        log.info("dispatch: as %s says", wanted)
        return
    table = _measured(ops, model) if collective.is_first else Table()
    ops.table = _shared(table, model, collective)


def _measured(ops: CudaOps, model: LlamaModel) -> Table:
    """The kept table of this machine, with what it lacks measured and kept."""
    begin_s = time.monotonic()
    device = model.layers[0].attention_norm.device
    facts = facts_of(device)
    path = path_of(facts)
    waiting = lambda: log.info("dispatch: waiting for another worker's measurement")  # noqa: E731
    try:
        with cache.exclusive(path.with_suffix(".lock"), waiting):
            table = load(path) if path.exists() else Table()
            known = table.to_json()
            missing = measure(ops, model.layers, table, begin_s + BUDGET_S)
            if table.to_json() != known:
                store(path, facts, table)
    except (OSError, DispatchError) as error:
        log.warning("dispatch: the default, as nothing can be kept: %s", error)
        return Table()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    log.info(
        "dispatch: %.1f s, %s (--dispatch %s runs with the same again)",
        time.monotonic() - begin_s,
        f"{missing} choices left to the next start" if missing else "all choices are known",
        path,
    )
    return table


def _shared(table: Table, model: LlamaModel, collective: Collective) -> Table:
    """The first rank's table, on all ranks; shapes are the same on all of them."""
    if collective.size == 1:
        return table
    cells = cells_of(model.layers[0])
    found = [table.choice(cell.key, cell.rows) for cell in cells]
    numbers = [0 if choice is None else 1 + CHOICES.index(choice) for choice in found]
    device = model.layers[0].attention_norm.device
    told = collective.from_first(torch.tensor(numbers, device=device)).tolist()
    shared = Table()
    for cell, number in zip(cells, told, strict=True):
        if number:
            shared.set(cell.key, cell.rows, CHOICES[number - 1])
    return shared
