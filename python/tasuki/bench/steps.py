"""Tables of step times, as the planner reads them: which points, in which order. Pure.

Every point is measured `repeat` times and its median kept. The repeats are
spread: each round takes all points in another order, so that whatever else the
machine does meets all alike. The first round warms up and is thrown away.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Protocol

from tasuki.bench.arguments import flag
from tasuki.bench.errors import BenchError


@dataclass(frozen=True, slots=True)
class PrefillPoint:
    """One prefill step of `tokens` on a prompt of which `context` tokens are there."""

    tokens: int
    context: int


@dataclass(frozen=True, slots=True)
class BackToBackPoint:
    """The same step after a second of others like it: it is launched while the one before runs."""

    tokens: int
    context: int


@dataclass(frozen=True, slots=True)
class DecodePoint:
    """One decode step of `batch` sequences with `context` tokens each."""

    batch: int
    context: int


@dataclass(frozen=True, slots=True)
class BesidePoint:
    """What a prompt of `tokens` adds to steps that decode `batch` sequences of `context` tokens."""

    tokens: int
    batch: int
    context: int


@dataclass(frozen=True, slots=True)
class TransferPoint:
    """A handoff of `blocks` scattered blocks from another process."""

    blocks: int


StepPoint = PrefillPoint | BackToBackPoint | DecodePoint | BesidePoint | TransferPoint


@dataclass(frozen=True, slots=True)
class StepGrid:
    """What to measure: every combination within a pair of lines, and prompts beside decodes.

    Attributes:
        prefill_tokens: Of a step.
        prefill_context: Tokens before it.
        decode_batch: Sequences in a step.
        decode_context: Tokens of each.
        transfer_blocks: In a handoff.
        repeat: Measurements of each point.
        seed: Of the order and of the prompts.
    """

    prefill_tokens: tuple[int, ...] = (32, 64, 128, 256, 512, 1024)
    prefill_context: tuple[int, ...] = (0, 512, 1024)
    decode_batch: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    decode_context: tuple[int, ...] = (128, 512, 1024)
    transfer_blocks: tuple[int, ...] = (1, 4, 16, 64, 256)
    repeat: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.repeat <= 1000:
            raise BenchError(f"--repeat is {self.repeat}: use a value from 1 to 1000")
        for name, values, least in (
            ("prefill_tokens", self.prefill_tokens, 1),
            ("prefill_context", self.prefill_context, 0),
            ("decode_batch", self.decode_batch, 1),
            ("decode_context", self.decode_context, 1),
            ("transfer_blocks", self.transfer_blocks, 1),
        ):
            if any(value < least for value in values):
                raise BenchError(f"{flag(name)} has {min(values)}: use {least} or more")

    @property
    def few_some_many(self) -> tuple[int, ...]:
        """Sequences of the steps whose launches, or what lies between them, are measured."""
        sizes = sorted(set(self.decode_batch))
        picked = {sizes[0], sizes[len(sizes) // 2], sizes[-1]} if sizes else set()
        return tuple(sorted(picked))

    @property
    def beside(self) -> list[BesidePoint]:
        """Prompts that fit into one step beside an average number of decodes."""
        sizes = sorted(set(self.decode_batch))
        if len(sizes) < 2 or not self.prefill_tokens:
            return []
        batch, context = sizes[(len(sizes) - 1) // 2], min(self.decode_context)
        most = max(self.prefill_tokens) - batch
        return [BesidePoint(t, batch, context) for t in self.prefill_tokens if t <= most]

    def points(self) -> list[StepPoint]:
        """All of them."""
        return [
            *(PrefillPoint(t, c) for c in self.prefill_context for t in self.prefill_tokens),
            *(BackToBackPoint(t, c) for c in self.prefill_context for t in self.prefill_tokens),
            *(DecodePoint(b, c) for c in self.decode_context for b in self.decode_batch),
            *self.beside,
            *(TransferPoint(b) for b in self.transfer_blocks),
        ]


GPU_SIZES: Mapping[str, Any] = {
    "prefill_tokens": (64, 512, 1024, 2048, 4096),
    "prefill_context": (0, 4096),
    "decode_batch": (1, 16, 32, 48, 64, 96, 128, 192, 256),
    "decode_context": (512, 2048, 4096),
    "transfer_blocks": (1, 32, 160),
    "repeat": 3,
}
"""Of a grid for a GPU, up to a worker's limits there."""


class StepTimer(Protocol):
    """Measures points in seconds."""

    def fits(self, point: StepPoint) -> bool:
        """Whether it can be measured with this engine and pool."""

    def measure(self, point: StepPoint) -> float:
        """Seconds of one step, or of one handoff."""


def measure_all(
    grid: StepGrid, timer: StepTimer, on_round: Callable[[int], None] = lambda number: None
) -> tuple[dict[StepPoint, float], list[StepPoint], BaseException | None]:
    """Medians of every point that fits, the points that do not, and what ended it early.

    After Ctrl-C or an error the medians are of what was measured before.

    Args:
        grid: What to measure.
        timer: Measures.
        on_round: Told the number of the round that begins; 0 is the warm-up.

    Raises:
        KeyboardInterrupt: Ctrl-C came before each point was measured once.
        Exception: A measurement failed before any point was measured.
    """
    points = grid.points()
    fitting = [point for point in points if timer.fits(point)]
    seen: dict[StepPoint, list[float]] = {point: [] for point in fitting}
    draw = random.Random(grid.seed)
    stopped: BaseException | None = None
    try:
        for number in range(grid.repeat + 1):
            on_round(number)
            for point in draw.sample(fitting, len(fitting)):
                seconds = timer.measure(point)
                if number > 0:
                    seen[point].append(seconds)
    except KeyboardInterrupt as interrupt:
        if not all(seen.values()):
            raise
        stopped = interrupt
    except Exception as error:
        if not any(seen.values()):
            raise
        stopped = error
    medians = {point: median(times) for point, times in seen.items() if times}
    return medians, [point for point in points if point not in seen], stopped


def step_tables(seconds: Mapping[StepPoint, float], block_bytes: int) -> dict[str, Any]:
    """The tables of a result file of kind "steps".

    Args:
        seconds: By point.
        block_bytes: Of one KV block.
    """
    tables: dict[str, list[dict[str, Any]]] = {
        name: [] for name in ("prefill", "back_to_back", "decode", "beside", "transfer")
    }
    for point, value in seconds.items():
        match point:
            case PrefillPoint(tokens, context):
                row = {"tokens": tokens, "context": context, "seconds": value}
                tables["prefill"].append(row)
            case BackToBackPoint(tokens, context):
                row = {"tokens": tokens, "context": context, "seconds": value}
                tables["back_to_back"].append(row)
            case DecodePoint(batch, context):
                row = {"batch": batch, "context": context, "seconds": value}
                tables["decode"].append(row)
            case BesidePoint(tokens, batch, context):
                row = {"tokens": tokens, "batch": batch, "context": context, "seconds": value}
                tables["beside"].append(row)
            case TransferPoint(blocks):
                row = {"blocks": blocks, "bytes": blocks * block_bytes, "seconds": value}
                tables["transfer"].append(row)
    return dict(tables)


def step_lines(tables: Mapping[str, Any]) -> Iterable[tuple[str, Sequence[str], list[list[str]]]]:
    """For printing: title, names of columns and rows of each table."""

    def timed(row: Mapping[str, Any], words: Sequence[str], rate: str) -> list[str]:
        return [*words, f"{1000 * row['seconds']:.2f}", rate]

    for name, size, title in (
        ("prefill", "tokens", "prefill step"),
        ("back_to_back", "tokens", "prefill steps back to back"),
        ("decode", "batch", "decode step"),
    ):
        yield (
            title,
            (size, "context", "ms", "tok/s"),
            [
                timed(
                    row, (str(row[size]), str(row["context"])), f"{row[size] / row['seconds']:.0f}"
                )
                for row in tables.get(name, ())
            ],
        )
    yield (
        "a prompt beside decodes adds",
        ("tokens", "batch", "ms"),
        [
            [str(row["tokens"]), str(row["batch"]), f"{1000 * row['seconds']:.2f}"]
            for row in tables.get("beside", ())
        ],
    )
    for name, title in (
        ("launch", "launch of a step"),
        ("between", "between steps"),
        ("messages", "messages of a request"),
    ):
        yield (
            title,
            ("batch", "ms"),
            [[str(row["batch"]), f"{1000 * row['seconds']:.2f}"] for row in tables.get(name, ())],
        )
    yield (
        "a lone prompt beside decodes",
        ("tokens", "batch", "context", "ms"),
        [
            [
                *(f"{row[name]:.0f}" for name in ("tokens", "batch", "context")),
                f"{1000 * row['seconds']:.2f}",
            ]
            for row in tables.get("lone", ())
        ],
    )
    yield (
        "KV transfer",
        ("blocks", "MB", "ms", "GB/s"),
        [
            timed(
                row,
                (str(row["blocks"]), f"{row['bytes'] / 1e6:.2f}"),
                f"{row['bytes'] / row['seconds'] / 1e9:.2f}",
            )
            for row in tables["transfer"]
        ],
    )
