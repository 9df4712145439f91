"""One run, request by request: where each one's time went, and what the whole gave."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from tasuki.plot.figures.common import chosen, described, number
from tasuki.plot.figures.marks import GREY, Axis, Curve, Figure, Panel, Spans
from tasuki.plot.options import Options
from tasuki.plot.run import Request, Results, Run

# In the order of a request's life; the place is the colour.
CLIENT, QUEUE, PREFILL, FIRST_TOKEN, MESSAGES, EXPOSED, FIRST_DECODE, DECODE, FAILED = range(9)
NAMES = (
    "client queue",
    "queue",
    "prefill",
    "until first token",
    "messages",
    "transfer exposed",
    "until second token",
    "decode",
    "failed",
)
_BUCKETS = 120
_WORTH_SHOWING = 0.01  # the client's share of all waiting


def timeline(results: Results, options: Options, colors: Mapping[str, int]) -> list[Figure]:
    """A figure for each label's run at the chosen load."""
    del colors  # colours are phases here
    runs = [run for run in results.runs if run.timed and run.requests]
    picked = chosen(runs, options.load)
    return [
        _figure(run, options.rows, f"-{i + 1}" if len(picked) > 1 else "")
        for i, run in enumerate(picked)
    ]


def phases_of(request: Request) -> Iterator[tuple[int, float, float]]:
    """The request's phases as (which, begin, end) in seconds; they touch and do not overlap.

    Where the server gave no account, the time until the first token is one phase.
    """
    if request.due_s is None:
        return
    sent_s = request.due_s if request.sent_s is None else request.sent_s
    yield CLIENT, request.due_s, sent_s
    if request.error is not None:
        yield FAILED, sent_s, sent_s if request.end_s is None else request.end_s
        return
    if request.first_s is None:
        return
    account = request.phases_ms
    now, first_s = sent_s, request.first_s
    for which, name in ((QUEUE, "queue_ms"), (PREFILL, "prefill_ms")):
        end = min(first_s, now + account.get(name, 0.0) / 1e3)
        yield which, now, end
        now = end
    yield FIRST_TOKEN, now, first_s
    end_s = first_s if request.end_s is None else request.end_s
    second_s = min(end_s, first_s if request.second_s is None else request.second_s)
    now = first_s
    for which, name in ((MESSAGES, "messages_ms"), (EXPOSED, "transfer_exposed_ms")):
        end = min(second_s, now + account.get(name, 0.0) / 1e3)
        yield which, now, end
        now = end
    yield FIRST_DECODE, now, second_s
    yield DECODE, second_s, end_s


def _figure(run: Run, most_rows: int, suffix: str) -> Figure:
    requests = sorted(
        (r for r in run.requests if r.due_s is not None), key=lambda r: r.due_s or 0.0
    )
    every = -(-len(requests) // most_rows)
    note = "A row is a request, from when it was due."
    if every > 1:
        note += f" One in {every} of {len(requests):,} requests is drawn; below, all count."
    end_s = max((r.end_s or r.first_s or r.due_s or 0.0 for r in requests), default=0.0)
    limits = (0.0, end_s * 1.01 or 1.0)
    return Figure(
        name=f"timeline{suffix}",
        title=f"{run.label} at {run.load.text}, request by request",
        subtitle=described([run], run.workload),
        panels=(
            Panel(
                Axis("", limits=limits),
                Axis("requests", reverse=True, limits=(-1.0, float(len(requests)))),
                spans=tuple(_spans(requests, every)),
            ),
            _throughput(requests, limits),
            _in_flight(requests, limits),
        ),
        heights=(0.6, 0.2, 0.2),
        note=note,
        phases=True,
        share_x=True,
    )


def _spans(requests: Sequence[Request], every: int) -> Iterator[Spans]:
    rows: dict[int, list[tuple[int, float, float]]] = {}
    for row in range(0, len(requests), every):
        for which, begin, end in phases_of(requests[row]):
            if end > begin or which == FAILED:
                rows.setdefault(which, []).append((row, begin, max(end - begin, 0.0)))
    for which in sorted(rows):
        spans = rows[which]
        yield Spans(
            NAMES[which],
            tuple(row for row, _, _ in spans),
            tuple(begin for _, begin, _ in spans),
            tuple(length for _, _, length in spans),
            which,
            every,
            hover=tuple(
                f"{NAMES[which]} {number(length * 1e3)} ms<br>{_hover(row, requests[row])}"
                for row, _, length in spans
            ),
        )


def _hover(row: int, request: Request) -> str:
    latencies = (
        f"{name.upper()} {number(request.latency_ms(name))} ms"
        for name in ("ttft", "ttst", "tpot", "e2e")
    )
    tokens = f"{number(request.input_tokens)} tokens in, {number(request.output_tokens)} out"
    return "<br>".join(
        (
            f"<b>request {row}</b>, due at {number(request.due_s)} s",
            request.error or tokens,
            *(() if request.error else latencies),
        )
    )


def _throughput(requests: Sequence[Request], limits: tuple[float, float]) -> Panel:
    """Output tokens per second, in buckets of at least a tenth of a second."""
    moments = [moment for r in requests for moment in r.chunk_s]
    tokens = [count for r in requests for count in r.chunk_tokens]
    width = max(0.1, limits[1] / _BUCKETS)
    edges = np.arange(0.0, limits[1] + width, width)
    counts, _ = np.histogram(moments, bins=edges, weights=tokens)
    curve = Curve(
        "output tokens/s",
        tuple(edges[:-1].tolist()),
        tuple((counts / width).tolist()),
        PREFILL,
        points=False,
        step=True,
        filled=True,
        in_legend=False,
    )
    return Panel(
        Axis("", limits=limits), Axis("tokens/s", from_zero=True), (curve,) if moments else ()
    )


def _in_flight(requests: Sequence[Request], limits: tuple[float, float]) -> Panel:
    """Requests sent and not ended, and due but not sent where there are any."""
    sent = _steps(
        [(r.sent_s, r.end_s) for r in requests if r.sent_s is not None and r.end_s is not None]
    )
    due = _steps(
        [(r.due_s, r.sent_s) for r in requests if r.due_s is not None and r.sent_s is not None]
    )
    curves = [_count("in flight", sent, DECODE)]
    waited = sum((r.sent_s or 0.0) - (r.due_s or 0.0) for r in requests if r.sent_s is not None)
    if waited > _WORTH_SHOWING * sum(r.end_s - r.due_s for r in requests if r.end_s and r.due_s):
        curves.append(_count("waiting in the client", due, GREY))
    return Panel(Axis("seconds", limits=limits), Axis("in flight", from_zero=True), tuple(curves))


def _count(name: str, steps: tuple[tuple[float, ...], tuple[float, ...]], color: int) -> Curve:
    return Curve(name, *steps, color, points=False, step=True, in_legend=False)


def _steps(spans: Sequence[tuple[float, float]]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """(moments, how many are open from then on)."""
    changes = sorted([(a, 1) for a, _ in spans] + [(b, -1) for _, b in spans])
    counts = np.cumsum([change for _, change in changes])
    return tuple(moment for moment, _ in changes), tuple(float(count) for count in counts)
