"""What several figures share: groups of runs, names, numbers in words, limits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tasuki.plot.errors import PlotError
from tasuki.plot.options import Options
from tasuki.plot.run import BatchTable, GoodputSearch, Run, Stats, StepTables

METRICS = {
    "ttft": "time to first token",
    "ttst": "time to second token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "e2e": "end-to-end latency",
}
# Runs of an unknown workload whose mean lengths differ by less count as the same.
_SAME_LENGTHS = 0.15


def number(value: float | None) -> str:
    """Three significant digits, thousands apart: "12,300", "4.57"; "-" for None."""
    if value is None:
        return "-"
    if abs(value) >= 999.5:
        digits = 3 - len(str(round(abs(value))))
        return f"{round(value, digits):,.0f}"
    return f"{value:.3g}"


def joined(parts: Iterable[str]) -> str:
    """What is known, without repeats, between middle dots."""
    return " · ".join(dict.fromkeys(part for part in parts if part))


def described(
    results: Sequence[Run | BatchTable | GoodputSearch | StepTables], workload: str = ""
) -> str:
    """A subtitle: models, machines, workload."""
    models = joined(r.model.rstrip("/").rsplit("/", 1)[-1] for r in results)
    machines = joined(r.machine for r in results if isinstance(r, Run))
    return joined((models, workload, machines))


def by_workload(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs that may stand on one line: of one workload, in words.

    Where a file does not say what was asked, the mean lengths tell.
    """
    known: list[tuple[float, float, str]] = []
    for run in sorted(runs, key=lambda r: not r.workload):  # those that say it first
        inputs, outputs = run.input_tokens_mean, run.output_tokens_mean
        if inputs and outputs and not (run.workload == "" and _near(known, inputs, outputs)):
            said = f"about {number(inputs)} tokens in, {number(outputs)} out"
            known.append((inputs, outputs, run.workload or said))
    groups: dict[str, list[Run]] = {}
    for run in runs:
        inputs, outputs = run.input_tokens_mean, run.output_tokens_mean
        guess = _near(known, inputs, outputs) if inputs and outputs else ""
        groups.setdefault(run.workload or guess, []).append(run)
    return groups


def _near(known: Sequence[tuple[float, float, str]], inputs: float, outputs: float) -> str:
    """The first known workload of about these lengths; empty when there is none."""
    for a, b, name in known:
        if abs(inputs - a) <= _SAME_LENGTHS * a and abs(outputs - b) <= _SAME_LENGTHS * b:
            return name
    return ""


def by_label(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """The runs of each line, from light to heavy load."""
    groups: dict[str, list[Run]] = {}
    for run in sorted(runs, key=lambda r: r.load.order):
        groups.setdefault(run.label, []).append(run)
    return groups


def chosen(runs: Sequence[Run], load: str) -> list[Run]:
    """One run for each label, all at one load and workload.

    Args:
        runs: Any.
        load: The load's text; empty: the middle one of those that most labels have.

    Raises:
        PlotError: No run has that load.
    """
    texts = dict.fromkeys(run.load.text for run in sorted(runs, key=lambda r: r.load.order))
    if load and texts and load not in texts:
        raise PlotError(f"--load {load}: there is no such load, only {', '.join(texts)}")
    order = list(texts)
    at: dict[tuple[str, str], dict[str, Run]] = {}
    for workload, group in by_workload(runs).items():
        for run in group:
            if not load or run.load.text == load:
                at.setdefault((workload, run.load.text), {})[run.label] = run
    most = max((len(labels) for labels in at.values()), default=0)
    candidates = [key for key, labels in at.items() if len(labels) == most]
    candidates.sort(key=lambda key: order.index(key[1]))
    return list(at[candidates[len(candidates) // 2]].values()) if candidates else []


def divisors(
    results: Sequence[Run | GoodputSearch], options: Options
) -> tuple[Mapping[str, float], str]:
    """By what each label's throughput is divided, and the unit's end: "", "/GPU", "/worker".

    Raises:
        PlotError: Asked for, but some deployment's size is not known.
    """
    if not options.per_gpu:
        return {r.label: 1.0 for r in results}, ""
    if not any(r.topology.gpus for r in results) and all(r.topology.workers for r in results):
        return {r.label: float(r.topology.workers or 1) for r in results}, "/worker"
    unknown = sorted({r.label for r in results if not r.topology.gpus})
    if unknown:
        raise PlotError(
            f"--per-gpu: {', '.join(unknown)}: the files do not say how many GPUs;"
            f" say it as {unknown[0]}@GPUS=PATH"
        )
    return {r.label: float(r.topology.gpus or 1) for r in results}, "/GPU"


def limits_ms(results: Iterable[Run | GoodputSearch], options: Options) -> dict[str, float]:
    """The SLO to draw: the command line's, else one that all results agree on."""
    if options.slo_ms:
        return dict(options.slo_ms)
    said = [dict(r.slo_ms) for r in results if r.slo_ms]
    return said[0] if said and all(each == said[0] for each in said) else {}


def slo_text(limits: Mapping[str, float]) -> str:
    """An SLO in words: "TTFT ≤ 2,000 ms, TPOT ≤ 50 ms"."""
    return ", ".join(f"{name.upper()} ≤ {number(limit)} ms" for name, limit in limits.items())


def hover(run: Run) -> str:
    """All of a run, for a point in the HTML."""

    def row(name: str, stats: Stats) -> str:
        if stats.mean is None and stats.median is None:
            return ""
        values = " / ".join(number(v) for v in (stats.mean, stats.median, stats.p90, stats.p99))
        return f"{name} {values} ms"

    per_second = (
        ("output", run.output_throughput, "tok/s"),
        ("input", run.input_throughput, "tok/s"),
        ("total", run.total_throughput, "tok/s"),
        ("requests", run.request_throughput, "/s"),
        ("goodput", run.goodput, "/s"),
    )
    size = (("workers", run.topology.workers), ("GPUs", run.topology.gpus))
    lines = [
        f"<b>{run.label}</b> at {run.load.text}",
        run.workload,
        f"{number(run.completed)} answered, {number(run.failed)} failed"
        + (f", in {number(run.duration_s)} s" if run.duration_s else ""),
        *(f"{name} {number(value)} {unit}" for name, value, unit in per_second if value),
        "" if run.attainment is None else f"SLO met by {run.attainment:.1%}",
        "mean / median / p90 / p99",
        *(row(name.upper(), getattr(run, name)) for name in METRICS),
        ", ".join(f"{count} {name}" for name, count in size if count),
        f"{run.tool}: {run.path.parent.name}/{run.path.name}",
    ]
    return "<br>".join(line for line in lines if line)


def spread(values: Iterable[float]) -> bool:
    """Whether values need a logarithmic axis."""
    positive = [value for value in values if value > 0]
    return bool(positive) and max(positive) > 50 * min(positive)


def start_note(runs: Iterable[Run]) -> str:
    """A warning when TTFT does not mean the same in all runs."""
    starts = {run.ttft_from for run in runs}
    if starts == {"due", "sent"}:
        return "TTFT counts from when a request was due in Tasuki's files, from sending in others."
    return "TTFT counts from sending." if starts == {"sent"} else ""
