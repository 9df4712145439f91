"""Where the time to the second token goes, as the load grows: the server's own account."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, median

from tasuki.plot.figures import timeline
from tasuki.plot.figures.common import by_label, by_workload, described, number
from tasuki.plot.figures.marks import Axis, Bars, Curve, Figure, Panel
from tasuki.plot.options import Options
from tasuki.plot.run import Results, Run

_PARTS = (
    (timeline.CLIENT, "client queue", "client_queue_ms"),
    (timeline.QUEUE, "queue", "queue_ms"),
    (timeline.PREFILL, "prefill", "prefill_ms"),
    (timeline.MESSAGES, "messages", "messages_ms"),
    (timeline.EXPOSED, "transfer exposed", "transfer_exposed_ms"),
    (timeline.FIRST_DECODE, "first decode", "first_decode_ms"),
)
# A queue that grows without end would flatten all other bars.
_CUT = 4.0
_CUT_NOTE = " Numbers stand in bars that go on above."


def phases(results: Results, options: Options, colors: Mapping[str, int]) -> list[Figure]:
    """A figure for each workload, a panel for each label; none without phases."""
    del options, colors  # means only: medians of parts do not add up
    figures = []
    groups = by_workload([r for r in results.runs if r.phases and r.ttst.mean is not None])
    for place, (workload, runs) in enumerate(groups.items()):
        lines = by_label(runs)
        texts = tuple(dict.fromkeys(r.load.text for r in sorted(runs, key=lambda r: r.load.order)))
        totals = [r.ttst.mean or 0.0 for r in runs]
        top = min(max(totals), _CUT * median(totals)) * 1.08
        suffix = f"-{place + 1}" if len(groups) > 1 else ""
        figures.append(
            Figure(
                name=f"phases{suffix}",
                title="Where the time to the second token goes",
                subtitle=described(runs, workload),
                panels=tuple(
                    _panel(label, group, texts, top, i == 0)
                    for i, (label, group) in enumerate(lines.items())
                ),
                columns=2 if len(lines) == 4 else min(3, len(lines)),
                note="Means over all requests; a bar ends at the time to the second token,"
                " the dot is the time to the first." + (_CUT_NOTE if max(totals) > top else ""),
                phases=True,
            )
        )
    return figures


def parts_ms(run: Run) -> list[tuple[int, str, float]]:
    """(colour, name, milliseconds) of each part; together the mean time to second token."""
    parts = []
    for color, name, key in _PARTS:
        mean = _mean_ms(run, key)
        if mean:
            parts.append((color, name, mean))
    rest = (run.ttst.mean or 0.0) - sum(value for _, _, value in parts)
    if rest > 0:
        parts.append((timeline.FIRST_TOKEN, "not accounted for", rest))
    return parts


def _mean_ms(run: Run, key: str) -> float:
    """Over all requests with a second token: of a phase that some have not, 0 counts for these.

    A file without requests has the mean of those that have the phase.
    """
    counted = [r for r in run.requests if r.measured and r.latency_ms("ttst") is not None]
    if not counted or key == "client_queue_ms":
        return run.phases[key].mean or 0.0 if key in run.phases else 0.0
    return fmean(request.phases_ms.get(key, 0.0) for request in counted)


def _panel(
    label: str, runs: Sequence[Run], texts: tuple[str, ...], top: float, legend: bool
) -> Panel:
    stacks: dict[tuple[int, str], list[tuple[float, float, float, str]]] = {}
    for run in runs:
        x, base = float(texts.index(run.load.text)), 0.0
        for color, name, value in parts_ms(run):
            text = f"<b>{label}</b> at {run.load.text}<br>{name} {number(value)} ms"
            stacks.setdefault((color, name), []).append((x, base, value, text))
            base += value
    bars = tuple(
        Bars(
            name,
            tuple(x for x, _, _, _ in stack),
            tuple(value for _, _, value, _ in stack),
            (color,) * len(stack),
            base=tuple(base for _, base, _, _ in stack),
            hover=tuple(text for _, _, _, text in stack),
            in_legend=legend,
        )
        for (color, name), stack in sorted(stacks.items())
    )
    first = Curve(
        "TTFT",
        tuple(float(texts.index(run.load.text)) for run in runs),
        tuple(run.ttft.mean or 0.0 for run in runs),
        timeline.FAILED,
        hover=tuple(f"TTFT {number(run.ttft.mean)} ms" for run in runs),
        line=False,
        in_legend=False,
    )
    beyond = [run for run in runs if (run.ttst.mean or 0.0) > top]
    heights = Curve(
        "above",
        tuple(float(texts.index(run.load.text)) for run in beyond),
        (top * 0.9,) * len(beyond),
        timeline.FAILED,
        labels=tuple(number(run.ttst.mean) for run in beyond),
        line=False,
        points=False,
        in_legend=False,
    )
    return Panel(
        Axis("load", categories=texts),
        Axis("milliseconds", limits=(0.0, top)),
        curves=(first, heights) if beyond else (first,),
        bars=bars,
        title=label,
    )
