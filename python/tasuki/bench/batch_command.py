"""`tasuki bench batch`: one-batch tables, and the step tables of the planner."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from tasuki.bench.arguments import flag
from tasuki.bench.batch import COLUMNS, BatchPoint, batch_points
from tasuki.bench.errors import BenchError, RunFailedError
from tasuki.bench.pairs import split_pair
from tasuki.command_line import described, end_like_interrupted

_INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class _Table:
    """What to measure, and where it goes.

    Attributes:
        points: The rows.
        repeat: Measurements of each.
        tokenizer: Its folder; None: prompts are words.
        path: Of the result.
        topology: The block of the result file; None: unknown.
    """

    points: list[BatchPoint]
    repeat: int
    tokenizer: Path | None
    path: Path
    topology: dict[str, Any] | None = None


Url = Annotated[
    str | None, described("Of a running OpenAI-compatible server [one is started].", "--url")
]
TopologyName = Annotated[
    str, described("What to start, such as 1m or 1p1d [1m].", "--topology", metavar="NAME")
]
Model = Annotated[str | None, described("Folder, hub id or alias [smollm2-135m; of the --url].")]
Tokenizer = Annotated[
    Path | None, described("Folder of the tokenizer [of the model that is started].")
]
Batches = Annotated[str, described("Requests at once [1,4,16].", "--batch", metavar="SIZES")]
Inputs = Annotated[str, described("Prompt tokens [128,512].", "--input-tokens", metavar="SIZES")]
Outputs = Annotated[str, described("Output tokens [16].", "--output-tokens", metavar="SIZES")]
Repeat = Annotated[
    int | None, described("Measurements of each, medians are kept [3; steps on a CPU 5].")
]
Serve = Annotated[
    list[str] | None,
    described(
        "Option of `tasuki serve` (steps: of the worker), a flag as NAME=true; repeatable.",
        metavar="NAME=VALUE",
    ),
]
Steps = Annotated[
    bool,
    described(
        "Measure one worker's steps and handoffs in this process instead: the tables that "
        "the planner reads. Takes no --url.",
        "--steps",
    ),
]
PrefillTokens = Annotated[str | None, described("Steps: prompt tokens.", metavar="SIZES")]
PrefillContext = Annotated[str | None, described("Steps: tokens before them.", metavar="SIZES")]
DecodeBatch = Annotated[str | None, described("Steps: sequences.", metavar="SIZES")]
DecodeContext = Annotated[str | None, described("Steps: tokens of each.", metavar="SIZES")]
TransferBlocks = Annotated[str | None, described("Steps: blocks of a handoff.", metavar="SIZES")]
Result = Annotated[
    Path | None, described("The result file [batch.json or steps.json].", "--output", "-o")
]


def batch(
    *,
    url: Url = None,
    topology: TopologyName = "1m",
    model: Model = None,
    tokenizer: Tokenizer = None,
    batches: Batches = "1,4,16",
    inputs: Inputs = "128,512",
    outputs: Outputs = "16",
    repeat: Repeat = None,
    serve: Serve = None,
    steps: Steps = False,
    prefill_tokens: PrefillTokens = None,
    prefill_context: PrefillContext = None,
    decode_batch: DecodeBatch = None,
    decode_context: DecodeContext = None,
    transfer_blocks: TransferBlocks = None,
    result: Result = None,
) -> None:
    """Time one batch at a time: latency, TTFT and rates for each batch x input x output."""
    from tasuki.bench.header import check_writable, write_result
    from tasuki.launch.supervisor import say

    if repeat is not None and not 1 <= repeat <= 1000:
        raise BenchError(f"--repeat is {repeat}: use a value from 1 to 1000")
    options: dict[str, Any] = dict(split_pair(pair, "--serve") for pair in serve or ())
    grid = {
        "prefill_tokens": prefill_tokens,
        "prefill_context": prefill_context,
        "decode_batch": decode_batch,
        "decode_context": decode_context,
        "transfer_blocks": transfer_blocks,
    }
    said: dict[str, Any] = {
        name: sizes(text, name) for name, text in grid.items() if text is not None
    }
    end_like_interrupted()
    try:
        if steps:
            if url is not None:
                raise BenchError("--steps measures in this process: leave out --url")
            if repeat is not None:
                said["repeat"] = repeat
            path = result or Path("steps.json")
            check_writable(path)
            content, error = _steps(model or "smollm2-135m", topology, options, said)
            write_result(path, content)
            say(f"written to {path}")
            if content["interrupted"]:
                say("interrupted; the tables are medians of the rounds before")
                raise typer.Exit(_INTERRUPTED)
            if error is not None:
                say("failed; the tables are medians of what was measured before")
                raise error
            return
        _check_serve(options, url)
        if said:
            raise BenchError(f"{flag(next(iter(said)))} belongs to --steps")
        points = batch_points(
            sizes(batches, "batch"), sizes(inputs, "input-tokens"), sizes(outputs, "output-tokens")
        )
        table = _Table(points, repeat or 3, tokenizer, result or Path("batch.json"))
        check_writable(table.path)
        if url is not None:
            _measure(table, url, model, say)
        else:
            _start_and_measure(table, topology, {"model": model or "smollm2-135m", **options}, say)
    except KeyboardInterrupt:
        say("interrupted; nothing was written")
        raise typer.Exit(_INTERRUPTED) from None


def _check_serve(options: dict[str, Any], url: str | None) -> None:
    """Refuses what would be ignored, or give another topology than the result says.

    Raises:
        BenchError: Naming the option and the remedy.
    """
    if options and url is not None:
        raise BenchError("--serve belongs to a server that is started: leave out --url, or --serve")
    for name in options:
        if name in ("prefill", "decode", "mixed"):
            raise BenchError(f"--serve has {name}: say it by --topology, such as 1p1d")
        if name == "port":
            raise BenchError("--serve has port: a free one is taken, so leave it out")


def sizes(text: str, name: str) -> tuple[int, ...]:
    """Numbers from `1,8,32`; an empty text is none.

    Raises:
        BenchError: One is no number.
    """
    try:
        return tuple(int(word) for word in text.split(",") if word.strip())
    except ValueError as error:
        raise BenchError(f"{flag(name)} is {text!r}: write numbers such as 1,8,32") from error


def _steps(
    model: str, topology: str, options: dict[str, Any], said: dict[str, Any]
) -> tuple[dict[str, Any], Exception | None]:
    """Measure the step tables with the threads that each worker of `topology` would have."""
    from tasuki.bench.steps import GPU_SIZES, StepGrid, step_lines
    from tasuki.bench.sweep_table import table
    from tasuki.bench.topologies import parse_topology
    from tasuki.launch.config import ServeConfig
    from tasuki.launch.gpus import is_on_gpus, usable_gpus
    from tasuki.launch.machine import look_at_machine
    from tasuki.launch.supervisor import say
    from tasuki.launch.topology import worker_environment

    on_gpus = is_on_gpus(str(options.get("device", "auto")), usable_gpus())
    grid = StepGrid(**({**GPU_SIZES, **said} if on_gpus else said))
    config = ServeConfig(model=model, topology=parse_topology(topology))
    for name, value in worker_environment(config, look_at_machine()).items():
        os.environ.setdefault(name, value)  # before torch is loaded
    from tasuki.bench.steps_run import run_steps

    content, error = run_steps(model, options, grid, say)
    for title, names, rows in step_lines(content):
        if rows:
            print(f"{title}\n{table(names, rows)}\n")
    return content, error


def _start_and_measure(
    table: _Table, topology: str, options: dict[str, Any], say: Callable[[str], None]
) -> None:
    """Start a server, measure it, and stop it."""
    from tasuki.bench.serve_options import with_flags
    from tasuki.bench.serving import Serving
    from tasuki.bench.topologies import Target, parse_topology, topology_name
    from tasuki.launch.gpus import usable_gpus
    from tasuki.models.fetch import resolve_model

    parsed = parse_topology(topology)
    options = with_flags(options, "--serve")
    target = Target(topology_name(parsed), parsed, tuple(options.items()))
    tokenizer = table.tokenizer or resolve_model(options["model"])
    say(f"starting {parsed}")
    serving = Serving(parsed, options, table.path.with_suffix(".serve.log"))
    try:
        block = target.describe(len(usable_gpus()))
        known = replace(table, tokenizer=tokenizer, topology=block)
        _measure(known, serving.url, serving.model, say, serving.ended)
    finally:
        serving.stop()


def _measure(
    table: _Table,
    url: str,
    model: str | None,
    say: Callable[[str], None],
    why_ended: Callable[[], str | None] = lambda: None,
) -> None:
    from tasuki.bench.batch_run import BatchTarget, run_batches
    from tasuki.bench.header import write_result
    from tasuki.bench.load import LoadRun, run_load
    from tasuki.bench.sweep_table import table as as_text

    defaults = {} if table.tokenizer is None else {"tokenizer": table.tokenizer}

    def measure(run: LoadRun) -> dict[str, Any]:
        try:
            return run_load(run, defaults)
        except (OSError, RunFailedError) as error:
            raise RunFailedError(why_ended() or str(error)) from error

    target = BatchTarget(
        url=url,
        model=model,
        topology=table.topology,
        label=url if table.topology is None else str(table.topology["name"]),
        seed=secrets.randbits(40),  # of its own, or the server may still hold the prompts
        log=table.path.with_suffix(".log"),
    )
    content, rows = run_batches(table.points, table.repeat, target, measure, say)
    print(as_text(COLUMNS, [row.cells() for row in rows]))
    write_result(table.path, content)
    say(f"written to {table.path}")
    if content["interrupted"]:
        say("interrupted; the rows are medians of the batches measured before")
        raise typer.Exit(_INTERRUPTED)
    if content["failed"]:
        say("some batches failed; their rows, if any, are medians of what was measured before")
        raise typer.Exit(1)
