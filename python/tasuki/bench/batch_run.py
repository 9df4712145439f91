"""Runs the one-batch table against a server: rounds over all points, medians kept."""

from __future__ import annotations

import itertools
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasuki.bench.batch import BatchPoint, BatchRow, batch_row, median_row
from tasuki.bench.errors import RunFailedError
from tasuki.bench.header import header
from tasuki.bench.load import LoadRun

_TIMEOUT_S = 3600.0


@dataclass(frozen=True, slots=True)
class BatchTarget:
    """What is asked.

    Attributes:
        url: Of the server.
        model: As requests call it; None: the first that the server lists.
        topology: The block of the result file; None: unknown.
        label: Names the line in plots.
        seed: Of the first prompts; every run takes the next one.
        log: Gets the client's output.
    """

    url: str
    model: str | None
    topology: Mapping[str, Any] | None
    label: str
    seed: int
    log: Path


def run_batches(
    points: Sequence[BatchPoint],
    repeat: int,
    target: BatchTarget,
    measure: Callable[[LoadRun], Mapping[str, Any]],
    say: Callable[[str], None],
) -> tuple[dict[str, Any], list[BatchRow]]:
    """Measure every point `repeat` times, each round in another order.

    A point that fails is not measured again, with a line that says why. A first round of
    the smallest point warms up and is thrown away. Ctrl-C ends it. Rows are of what was
    measured before a failure or Ctrl-C.

    Returns:
        The result of kind "batch", and its rows in the order of `points`.

    Raises:
        KeyboardInterrupt: Ctrl-C came before the first batch was measured.
        RunFailedError: Not one point could be measured.
    """
    seeds = itertools.count(target.seed)
    seen: dict[BatchPoint, list[BatchRow]] = {point: [] for point in points}
    failed: dict[BatchPoint, str] = {}
    model = target.model

    def once(point: BatchPoint) -> BatchRow:
        nonlocal model
        with tempfile.TemporaryDirectory() as folder:
            result = measure(
                LoadRun(
                    url=target.url,
                    model=model,
                    options={**point.options(next(seeds)), "warmup": 0},
                    topology=target.topology,
                    label=target.label,
                    result=Path(folder, "batch.json"),
                    log=target.log,
                    timeout_s=_TIMEOUT_S,
                )
            )
        model = result["model"]
        return batch_row(point, result)

    draw = random.Random(target.seed)
    interrupted = False
    try:
        once(min(points, key=lambda point: point.batch * point.input_tokens))
        for number in range(1, repeat + 1):
            for point in draw.sample(points, len(points)):
                if point in failed:
                    continue
                try:
                    seen[point].append(once(point))
                except RunFailedError as error:
                    failed[point] = str(error)
                    say(f"batch {point.batch}, {point.input_tokens} in: FAILED: {error}")
            say(f"round {number} of {repeat} done")
    except KeyboardInterrupt:
        if not any(seen.values()):
            raise
        interrupted = True
    rows = [median_row(seen[point]) for point in points if seen[point]]
    if not rows:
        raise RunFailedError(f"no batch was measured: {next(iter(failed.values()))}")
    content = header(
        "batch",
        label=target.label,
        topology=target.topology,
        model=model or "",
    )
    result = {
        **content,
        "base_url": target.url,
        "repeat": repeat,
        "interrupted": interrupted,
        "rows": [row.as_dict() for row in rows],
        "failed": [
            {
                "batch": point.batch,
                "input_tokens": point.input_tokens,
                "output_tokens": point.output_tokens,
                "reason": reason,
            }
            for point, reason in failed.items()
        ],
    }
    return result, rows
