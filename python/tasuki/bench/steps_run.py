"""Measures the step tables of one worker on this machine, in this process.

The worker is built as `tasuki worker` builds it (model, pool, attention,
transport), so that what is measured is what will serve; there is no router, no
HTTP and no other worker but the one whose blocks are read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import closing, nullcontext
from dataclasses import fields
from statistics import median
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError

from tasuki.bench.between_timer import (
    LONE_PROMPT_TOKENS,
    MEAN_CONTEXT,
    Loads,
    Lone,
    Served,
    between_s,
    medians,
    period_s,
    serve_loads,
)
from tasuki.bench.engine_timer import EngineTimer
from tasuki.bench.errors import BenchError
from tasuki.bench.header import header
from tasuki.bench.steps import (
    BackToBackPoint,
    DecodePoint,
    StepGrid,
    StepPoint,
    TransferPoint,
    measure_all,
    step_tables,
)
from tasuki.bench.transfer_timer import TransferTimer
from tasuki.command_line import parse_bytes
from tasuki.kv.transport import Transport
from tasuki.models.fetch import resolve_model
from tasuki.worker.build import build
from tasuki.worker.config import WorkerConfig
from tasuki.worker.startup import Phases, keep_compiled


class _BothTimers:
    """Steps go to the engine, handoffs to the transport."""

    def __init__(self, engine: EngineTimer, transfer: TransferTimer | None) -> None:
        self._engine = engine
        self._transfer = transfer

    def _of(self, point: StepPoint) -> EngineTimer | TransferTimer | None:
        return self._transfer if isinstance(point, TransferPoint) else self._engine

    def fits(self, point: StepPoint) -> bool:
        timer = self._of(point)
        return timer is not None and timer.fits(point)

    def measure(self, point: StepPoint) -> float:
        timer = self._of(point)
        assert timer is not None
        return timer.measure(point)


def run_steps(
    model: str, options: Mapping[str, Any], grid: StepGrid, say: Callable[[str], None]
) -> tuple[dict[str, Any], Exception | None]:
    """Build a worker's engine, measure the grid, and give the result of kind "steps".

    Ctrl-C ends it once each point was measured: the result says `interrupted`, and on a GPU lacks
    what is measured last, launches and what lies between steps. An error ends it, too: the result
    has what was measured before and says why it `failed`, and the error comes with it.

    Args:
        model: Folder, hub id or alias.
        options: Of `tasuki worker`, by name; others are as a worker has them.
        grid: What to measure.
        say: Gets news, one line each.

    Raises:
        KeyboardInterrupt: Ctrl-C came earlier.
        Exception: The worker cannot be built, or the first measurements failed.
    """
    keep_compiled()
    config = worker_config(model, options, grid)
    served = Served({}, {}, {})
    if grid.decode_batch:  # before the engine, which takes the memory
        say("measuring the steps of a worker that serves …")
        served = serve_loads(config, grid.few_some_many, grid.repeat)
    say(f"building an engine for {config.model.name} …")
    built = build(config, Phases(time.monotonic()))
    transfer = None
    if grid.transfer_blocks:
        device = _source_device(built.transport)
        most = max(grid.transfer_blocks)
        transfer = TransferTimer(built.transport, built.layout, most, device, grid.seed)
    of_engine = EngineTimer(built.engine, grid.seed)
    timer = _BothTimers(of_engine, transfer)

    def tell(number: int) -> None:
        say("warming up …" if number == 0 else f"round {number} of {grid.repeat} …")

    with closing(transfer) if transfer is not None else nullcontext():
        seconds, left_out, stopped = measure_all(grid, timer, tell)
    overlaps = built.engine.config.overlap
    for point in left_out:
        if isinstance(point, BackToBackPoint) and not overlaps:
            continue  # it would be a prefill step
        say(f"left out, as it fits neither the pool nor the limits of the worker: {point}")
    content = header("steps", label=config.model.name, topology=None, model=model)
    content |= {
        "engine": {
            "dtype": built.info.dtype,
            "kv_dtype": built.info.kv_dtype,
            "block_size_tokens": built.layout.block_size,
            "block_bytes": built.layout.block_bytes,
            "num_blocks": built.layout.num_blocks,
            "threads": torch.get_num_threads(),
        },
        "repeat": grid.repeat,
        "decode_rows": list(built.decode_rows),
        **step_tables(seconds, built.layout.block_bytes),
        **_lone_tables(served.lone),
    }
    if not overlaps:
        content["between"] = _by_batch(medians(served.loads, between_s))
        return _stopped(content, stopped)
    between, launches = {}, {}
    try:
        if stopped is None:
            between = _longer(served.loads, timer, grid.repeat)
            points = [DecodePoint(batch, min(grid.decode_context)) for batch in grid.few_some_many]
            launches = {
                p.batch: of_engine.launch_s(p.batch, p.context) for p in points if timer.fits(p)
            }
    except (KeyboardInterrupt, Exception) as error:
        stopped = error
    content |= {
        "launch": _by_batch(launches),
        "between": _by_batch(between),
        "planned_ahead": _by_batch(served.ahead),
    }
    return _stopped(content, stopped)


def _stopped(
    content: dict[str, Any], stopped: BaseException | None
) -> tuple[dict[str, Any], Exception | None]:
    """A result that says what ended its measurement early, and the error if it was one."""
    error = stopped if isinstance(stopped, Exception) else None
    content["interrupted"] = stopped is not None and error is None
    content["failed"] = None if error is None else str(error) or type(error).__name__
    return content, error


def _longer(loads: Loads, timer: _BothTimers, repeat: int) -> dict[int, float]:
    """How much longer steps of a worker that serves take, where the device goes on in a pause."""
    between = {}
    for batch, served_s in medians(loads, period_s).items():
        if timer.fits(point := DecodePoint(batch, MEAN_CONTEXT)):
            alone_s = median(timer.measure(point) for _ in range(repeat))
            between[batch] = max(0.0, served_s - alone_s)
    return between


def _lone_tables(lone: Mapping[int, Lone]) -> dict[str, Any]:
    return {
        "messages": _by_batch({batch: seen.messages_s for batch, seen in lone.items()}),
        "lone": [
            {
                "tokens": LONE_PROMPT_TOKENS,
                "batch": batch,
                "context": seen.context,
                "seconds": seen.worker_s,
            }
            for batch, seen in sorted(lone.items())
        ],
    }


def _by_batch(seconds: Mapping[int, float]) -> list[dict[str, Any]]:
    return [{"batch": batch, "seconds": value} for batch, value in sorted(seconds.items())]


def worker_config(model: str, options: Mapping[str, Any], grid: StepGrid) -> WorkerConfig:
    """The worker's settings: as told, with room for the largest point of the grid.

    Raises:
        BenchError: An option is none of a worker's, or has no such value.
        ConfigError: A value is out of its range.
    """
    said = {name.replace("-", "_"): value for name, value in options.items()}
    for name in said.keys() - {field.name for field in fields(WorkerConfig)}:
        dashed = name.replace("_", "-")
        raise BenchError(
            f"option {dashed} is none of a worker's: `tasuki worker --help` lists them"
        )
    if isinstance(said.get("kv_memory"), str):
        said["kv_memory"] = parse_bytes(said["kv_memory"])
    fitting = {
        "max_batched_tokens": max(grid.prefill_tokens, default=None),
        "max_running_requests": max(grid.decode_batch, default=None),
        "itl_target_ms": 0,  # each point is one step, however long
    }
    try:
        return TypeAdapter(WorkerConfig).validate_python(
            {**fitting, **said, "model": resolve_model(model), "name": "steps"}
        )
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]).replace("_", "-")
        raise BenchError(f"option {name} of the worker: {first['msg'].lower()}") from error


def _source_device(transport: Transport) -> str:
    """Where the other worker's pool lies: on the next GPU, if there are several."""
    pool = transport.layout.pool
    if pool.memory == "DRAM":
        return "cpu"
    return f"cuda:{(pool.device + 1) % torch.cuda.device_count()}"
