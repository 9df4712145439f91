"""From the command line's words to `Results`: finds result files and tells them by content."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tasuki.plot.errors import PlotError, ResultFileError
from tasuki.plot.readers import (
    aiperf,
    evalscope,
    genai_bench,
    openai_bench,
    plan,
    request_log,
    tasuki,
)
from tasuki.plot.run import (
    BatchTable,
    GoodputSearch,
    LinkTable,
    Plan,
    Results,
    RolesTimeline,
    Run,
    StepTables,
)

_Item = Run | BatchTable | GoodputSearch | StepTables | LinkTable | Plan | RolesTimeline
_Read = Callable[[Path, list[dict[str, Any]], str], Iterator[_Item]]
_READERS: tuple[tuple[Callable[[dict[str, Any]], bool], _Read], ...] = tuple(
    (reader.recognises, reader.read)
    for reader in (tasuki, plan, openai_bench, genai_bench, evalscope, aiperf)
)
# Read together with the results beside them, or not needed for pictures.
_PARTS = ("experiment_metadata.json", "sweep.json", *evalscope.PARTS)
# A request log of the router, or what a run printed.
_RUNS_LOG = ".log"
_SUFFIXES = (".json", ".jsonl", ".csv", _RUNS_LOG)
_KNOWN = (
    "tasuki bench, a request log, vllm bench serve, SGLang bench_serving, genai-bench, evalscope"
    " and AIPerf"
)


@dataclass(frozen=True, slots=True)
class Source:
    """One word of the command line: `PATH`, `LABEL=PATH` or `LABEL@GPUS=PATH`.

    Attributes:
        label: Replaces the label of everything in it; empty: leave it.
        gpus: GPUs of the deployment, for files that do not say.
    """

    path: Path
    label: str = ""
    gpus: int | None = None

    @classmethod
    def parse(cls, word: str) -> Source:
        """Read a word; a path that exists is a path, whatever it holds.

        Raises:
            PlotError: There is nothing at the path, or GPUS is not a number above 0.
        """
        path, label, gpus = Path(word), "", ""
        if not path.exists() and "=" in word:
            said, _, rest = word.partition("=")
            path = Path(rest)
            label, _, gpus = said.partition("@")
        if not path.exists():
            raise PlotError(f"{path}: no such file or folder")
        if gpus and not (gpus.isdigit() and int(gpus) > 0):
            raise PlotError(f"{word}: GPUs in LABEL@GPUS=PATH are a number above 0, not {gpus!r}")
        return cls(path, label, int(gpus) if gpus else None)


def load(sources: Sequence[Source]) -> Results:
    """Read every result file in the sources, folders to any depth.

    Raises:
        ResultFileError: A file is broken, cannot be read, or was named and is no result.
        PlotError: There is no result at all.
    """
    found: list[_Item] = []
    skipped: list[Path] = []
    for source in sources:
        for path in _files(source.path):
            try:
                items = _read(path, source)
            except OSError as error:
                raise ResultFileError(path, f"cannot be read: {error.strerror}") from error
            if items is None and path == source.path:
                raise ResultFileError(path, f"is not a result of {_KNOWN}")
            if items == [] and path == source.path:
                raise ResultFileError(path, "has no result of a kind that has a picture")
            if items is None and path.name not in _PARTS and path.suffix != _RUNS_LOG:
                skipped.append(path)
            found += [_said(item, source) for item in items or ()]
    if not found:
        where = ", ".join(str(source.path) for source in sources)
        raise PlotError(f"{where}: no result of {_KNOWN} (looked at {len(skipped)} files)")
    return Results(
        runs=tuple(sorted((i for i in found if isinstance(i, Run)), key=lambda r: r.load.order)),
        batches=tuple(i for i in found if isinstance(i, BatchTable)),
        searches=tuple(i for i in found if isinstance(i, GoodputSearch)),
        steps=tuple(i for i in found if isinstance(i, StepTables)),
        links=tuple(i for i in found if isinstance(i, LinkTable)),
        plans=tuple(i for i in found if isinstance(i, Plan)),
        roles=tuple(i for i in found if isinstance(i, RolesTimeline)),
        skipped=tuple(skipped),
    )


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    found = (p for p in path.rglob("*") if p.suffix in _SUFFIXES and p.is_file())
    return sorted(p for p in found if not p.name.startswith("."))


def _read(path: Path, source: Source) -> list[_Item] | None:
    """What a file holds; None when it is no result file."""
    label = path.stem if path == source.path else path.parent.name or path.resolve().parent.name
    if path.suffix == ".csv":
        return list(aiperf.read_csv(path, label)) if aiperf.is_summary_csv(path) else None
    if request_log.is_log(path):
        return list(request_log.read(path, label))
    if path.suffix == _RUNS_LOG:
        return None
    objects = _objects(path)
    for recognises, read in _READERS:
        if objects and recognises(objects[0]):
            return list(read(path, objects, label))
    return None


def _objects(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a file: one, or one on each line; none when it holds other JSON."""
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        values = [json.loads(text)]
    except (ValueError, RecursionError) as whole:
        lines = [line for line in text.splitlines() if line.strip()]
        try:
            values = [json.loads(line) for line in lines]
        except (ValueError, RecursionError):
            raise ResultFileError(path, f"is not JSON: {whole}") from whole
    return [v for v in values if isinstance(v, dict)]


def _said(item: _Item, source: Source) -> _Item:
    """The item, under what the command line says of it."""
    if source.label:
        item = replace(item, label=source.label)
    if source.gpus is not None and not isinstance(item, LinkTable | Plan | RolesTimeline):
        item = replace(item, topology=replace(item.topology, gpus=source.gpus))
    return item
