"""What the figures say, before anybody draws them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from plot_synthetic import SLO, steps_result, write_sweep

from tasuki.plot.errors import PlotError
from tasuki.plot.figures.batch import knee
from tasuki.plot.figures.common import by_workload, chosen, number
from tasuki.plot.figures.marks import Curve, Figure, Guide, Panel
from tasuki.plot.figures.pareto import frontier
from tasuki.plot.figures.phases import parts_ms
from tasuki.plot.figures.registry import figures
from tasuki.plot.figures.timeline import (
    CLIENT,
    DECODE,
    EXPOSED,
    FAILED,
    FIRST_DECODE,
    FIRST_TOKEN,
    MESSAGES,
    PREFILL,
    QUEUE,
    phases_of,
)
from tasuki.plot.load import Source, load
from tasuki.plot.options import Against, Options, Statistic, Throughput, parse_slo
from tasuki.plot.run import BatchRow, Load, Request, Results, Run, Stats, Topology


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return load([Source(write_sweep(tmp_path_factory.mktemp("sweep"), rates=(1, 2, 4)))])


def one(results: Results, name: str, options: Options | None = None) -> Figure:
    return figures(results, options or Options(), name)[0]


def curve(panel: Panel, name: str) -> Curve:
    (found,) = [curve for curve in panel.curves if curve.name == name]
    return found


def run(
    label: str = "a",
    output: float = 100.0,
    tpot: float = 10.0,
    ttft: float = 50.0,
    rate: float = 1.0,
    topology: Topology | None = None,
) -> Run:
    return Run(
        Path(f"{label}/{rate}.json"),
        "tasuki",
        label,
        load=Load(rate=rate),
        topology=topology or Topology(workers=2),
        output_throughput=output,
        tpot=Stats(mean=tpot + 1, median=tpot, p99=tpot * 2),
        ttft=Stats(mean=ttft + 1, median=ttft, p99=ttft * 2),
    )


def test_pareto_has_a_line_for_each_topology_in_order_of_load(sweep: Results) -> None:
    figure = one(sweep, "pareto")
    (panel,) = figure.panels
    assert [c.name for c in panel.curves] == ["frontier", "1p1d", "1p2d", "2p1d", "3m"]
    line = curve(panel, "2p1d")
    mine = [r for r in sweep.runs if r.label == "2p1d"]
    assert line.labels == ("1/s", "2/s", "4/s")
    assert line.x == tuple(r.tpot.median for r in mine)
    assert line.y == tuple(r.output_throughput for r in mine)
    assert all("<b>2p1d</b>" in text and "TTFT" in text for text in line.hover)
    assert panel.guides == (Guide("x", 30.0, "SLO 30 ms"),)
    assert [c.color for c in panel.curves[1:]] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("against", "x", "axis"),
    [
        (Against.tpot, 10.0, "median TPOT (ms), less is better"),
        (Against.ttft, 50.0, "median TTFT (ms), less is better"),
        (Against.chunk, 15 * 10.0 + 50.0, "median TTFT + 15 x TPOT (ms), less is better"),
        (Against.interactivity, 100.0, "tokens/s for each user (1 / median TPOT), more is better"),
    ],
)
def test_what_throughput_is_set_against(against: Against, x: float, axis: str) -> None:
    figure = one(Results(runs=(run(),)), "pareto", Options(against=against))
    (panel,) = figure.panels
    assert (curve(panel, "a").x, panel.x.title) == ((x,), axis)


def test_another_statistic_and_throughput() -> None:
    options = Options(statistic=Statistic.p99, throughput=Throughput.request)
    results = Results(runs=(replace(run(), request_throughput=3.0),))
    (panel,) = one(results, "pareto", options).panels
    assert (curve(panel, "a").x, curve(panel, "a").y) == ((20.0,), (3.0,))
    assert panel.y.title == "requests/s"


def test_per_gpu_counts_all_gpus_of_the_topology() -> None:
    runs = (run("a", topology=Topology(gpus=4)), run("b", topology=Topology(gpus=2)))
    (panel,) = one(Results(runs=runs), "pareto", Options(per_gpu=True)).panels
    assert panel.y.title == "output tokens/s/GPU"
    assert (curve(panel, "a").y, curve(panel, "b").y) == ((25.0,), (50.0,))


def test_per_worker_where_there_are_no_gpus() -> None:
    (panel,) = one(Results(runs=(run(),)), "pareto", Options(per_gpu=True)).panels
    assert (panel.y.title, curve(panel, "a").y) == ("output tokens/s/worker", (50.0,))


def test_per_gpu_of_unknown_size_is_refused() -> None:
    runs = (run("a", topology=Topology(gpus=4)), run("b", topology=Topology()))
    with pytest.raises(PlotError, match=r"b: the files do not say how many GPUs.*b@GPUS=PATH"):
        figures(Results(runs=runs), Options(per_gpu=True), "pareto")


def test_the_frontier_is_what_nothing_beats() -> None:
    points = [(1.0, 1.0), (2.0, 3.0), (3.0, 2.0), (4.0, 5.0), (2.0, 2.5)]
    assert frontier(points, more_is_better=False) == [0, 1, 3]
    assert frontier(points, more_is_better=True) == [3]
    assert frontier([(1.0, 9.0), (5.0, 2.0), (3.0, 1.0)], more_is_better=True) == [1, 0]


def test_failures_are_written_beside_the_point() -> None:
    (panel,) = one(Results(runs=(replace(run(), failed=3),)), "pareto").panels
    assert curve(panel, "a").labels == ("1/s (3 failed)",)


def test_workloads_do_not_share_a_line() -> None:
    short, long = replace(run(), workload="fixed 10:10"), replace(run(), workload="fixed 99:10")
    figure = one(Results(runs=(short, long)), "pareto")
    assert [panel.title for panel in figure.panels] == ["fixed 10:10", "fixed 99:10"]


def test_unknown_workloads_are_told_by_their_lengths() -> None:
    runs = [
        replace(run(rate=float(i)), input_tokens_mean=a, output_tokens_mean=b)
        for i, (a, b) in enumerate([(528, 521), (500, 540), (5000, 250)], start=1)
    ]
    groups = by_workload(runs)
    assert [len(group) for group in groups.values()] == [2, 1]
    named = replace(run(), workload="w", input_tokens_mean=5100.0, output_tokens_mean=251.0)
    assert [len(group) for group in by_workload([*runs, named]).values()] == [2, 2]
    assert list(groups) == ["about 528 tokens in, 521 out", "about 5,000 tokens in, 250 out"]


def test_the_chosen_load_is_the_middle_one_that_all_have() -> None:
    runs = [run("a", rate=r) for r in (1, 2, 3, 4)] + [run("b", rate=r) for r in (2, 3, 4)]
    assert [(r.label, r.load.rate) for r in chosen(runs, "")] == [("a", 3), ("b", 3)]
    assert [(r.label, r.load.rate) for r in chosen(runs, "1/s")] == [("a", 1)]
    named, unnamed = (
        replace(run(label), workload=workload, input_tokens_mean=10.0, output_tokens_mean=9.0)
        for label, workload in (("a", "w"), ("b", ""))
    )
    assert len(chosen([named, unnamed], "")) == 2, "lengths tell the unnamed workload"
    with pytest.raises(PlotError, match="--load 9/s: there is no such load, only 1/s, 2/s, "):
        chosen(runs, "9/s")
    assert chosen([], "9/s") == [], "the figure says what it needs"


def test_load_shows_latency_and_throughput_against_the_rate(sweep: Results) -> None:
    figure = one(sweep, "load")
    titles = [panel.y.title for panel in figure.panels]
    assert titles == ["output tokens/s", "median TTFT (ms)", "median TTST (ms)", "median TPOT (ms)"]
    ttft = curve(figure.panels[1], "3m")
    assert ttft.x == (1.0, 2.0, 4.0)
    assert ttft.y == tuple(r.ttft.median for r in sweep.runs if r.label == "3m")
    assert figure.panels[1].guides[0].value == SLO["ttft_s"] * 1e3
    assert not figure.panels[2].guides, "no limit on TTST"


def test_cdf_has_all_latencies_and_offers_all_loads(sweep: Results) -> None:
    figure = one(sweep, "cdf")
    assert [p.x.title[:4] for p in figure.panels] == ["TTFT", "TTST", "TPOT", "ITL ", "E2E "]
    assert (figure.choices, figure.choice) == (("1/s", "2/s", "4/s"), "2/s")
    (line,) = [c for c in figure.panels[0].curves if c.name == "1p1d" and figure.shows(c)]
    (measured,) = [r for r in sweep.runs if r.label == "1p1d" and r.load.rate == 2]
    assert line.y[0] == 0 and line.y[-1] == 1 and list(line.x) == sorted(line.x)
    assert line.x[line.y.index(0.5)] == pytest.approx(measured.ttft.median, rel=1e-3)
    assert line.x[-1] == pytest.approx(measured.ttft.max, rel=1e-3)
    assert one(sweep, "cdf", Options(load="4/s")).choice == "4/s"


def test_cdf_from_percentiles_is_dashed_and_says_so() -> None:
    vllm = replace(run(), ttft=Stats(median=10.0, p99=30.0))
    figure = one(Results(runs=(vllm,)), "cdf")
    line = figure.panels[0].curves[0]
    assert (line.x, line.y, line.dashed) == ((10.0, 30.0), (0.5, 0.99), True)
    assert figure.note.startswith("Dashed: ")


def test_a_requests_phases_touch_and_keep_its_moments() -> None:
    request = Request(
        due_s=1.0,
        sent_s=1.1,
        first_s=2.0,
        second_s=2.2,
        end_s=3.0,
        phases_ms={"queue_ms": 200.0, "prefill_ms": 600.0}
        | {"messages_ms": 20.0, "transfer_exposed_ms": 50.0},
    )
    expected = [
        (CLIENT, 1.0, 1.1),
        (QUEUE, 1.1, 1.3),
        (PREFILL, 1.3, 1.9),
        (FIRST_TOKEN, 1.9, 2.0),
        (MESSAGES, 2.0, 2.02),
        (EXPOSED, 2.02, 2.07),
        (FIRST_DECODE, 2.07, 2.2),
        (DECODE, 2.2, 3.0),
    ]
    found = list(phases_of(request))
    assert [which for which, _, _ in found] == [which for which, _, _ in expected]
    for (_, begin, end), (_, a, b) in zip(found, expected, strict=True):
        assert (begin, end) == (pytest.approx(a), pytest.approx(b))


def test_phases_never_leave_the_request() -> None:
    account = {"queue_ms": 5000.0, "prefill_ms": 5000.0, "transfer_exposed_ms": 9e9}
    request = Request(
        due_s=0.0, sent_s=0.0, first_s=1.0, second_s=1.5, end_s=2.0, phases_ms=account
    )
    spans = list(phases_of(request))
    assert all(a <= b for _, a, b in spans) and spans[0][1] == 0.0 and spans[-1][2] == 2.0
    assert sum(b - a for _, a, b in spans) == pytest.approx(2.0)
    failed = list(phases_of(Request(due_s=0.0, sent_s=0.5, end_s=0.7, error="refused")))
    assert failed == [(CLIENT, 0.0, 0.5), (FAILED, 0.5, 0.7)]


def test_the_timeline_adds_up(sweep: Results) -> None:
    figure = one(sweep, "timeline", Options(load="4/s"))
    (measured,) = [r for r in sweep.runs if r.label == "1p1d" and r.load.rate == 4]
    rows, throughput, in_flight = figure.panels
    decode = next(span for span in rows.spans if span.name == "decode")
    assert len(decode.row) == len(measured.requests)
    (tokens,) = throughput.curves
    width = tokens.x[1] - tokens.x[0]
    written = sum(len(r.chunk_s) for r in measured.requests)
    assert sum(tokens.y) * width == pytest.approx(written)
    (flying,) = [c for c in in_flight.curves if c.name == "in flight"]
    assert min(flying.y) == 0 and flying.y[-1] == 0
    assert len(figures(sweep, Options(), "timeline")) == 4, "one for each topology"


def test_a_long_timeline_is_cut_and_says_so(sweep: Results) -> None:
    figure = one(sweep, "timeline", Options(rows=10))
    rows = {row for span in figure.panels[0].spans for row in span.row}
    assert rows == set(range(0, 120, 12))
    assert {span.height for span in figure.panels[0].spans} == {12}
    assert "One in 12 of 120 requests is drawn" in figure.note


def test_parts_end_at_the_time_to_the_second_token(sweep: Results) -> None:
    for measured in sweep.runs:
        total = sum(value for _, _, value in parts_ms(measured))
        assert total == pytest.approx(measured.ttst.mean, rel=0.02)
    figure = one(sweep, "phases")
    assert [panel.title for panel in figure.panels] == ["1p1d", "1p2d", "2p1d", "3m"]
    assert "transfer exposed" in {bars.name for bars in figure.panels[0].bars}
    assert "transfer exposed" not in {bars.name for bars in figure.panels[3].bars}


def test_goodput_of_searches(sweep: Results) -> None:
    bars_panel, attainment, offered = one(sweep, "goodput").panels
    (bars,) = bars_panel.bars
    assert bars_panel.x.categories == ("1p1d", "1p2d", "2p1d", "3m")
    assert bars.height == pytest.approx((3.0, 3.0, 4.0, 5.9))
    assert (bars.low[0], bars.high[0]) == pytest.approx((2.7, 3.3))
    assert curve(attainment, "1p1d").x == pytest.approx((1.5, 2.7, 3.0, 3.3, 4.5))
    assert curve(offered, "3m").y == tuple(r.goodput for r in sweep.runs if r.label == "3m")
    figure = one(sweep, "goodput")
    assert figure.note == "SLO: TTFT ≤ 1,000 ms, TPOT ≤ 30 ms. Whiskers: 95% confidence."


def test_a_search_without_an_upper_end_or_that_failed_says_so(sweep: Results) -> None:
    searches = [replace(search, interval=(2.7, math.inf)) for search in sweep.searches]
    searches[1] = replace(searches[1], finished=False)
    (bars,) = one(replace(sweep, searches=searches), "goodput").panels[0].bars
    assert bars.labels[:2] == ("≥ 3", "≥ 3\nnot finished")
    assert "2.7 or more" in bars.hover[0]
    assert (bars.low[0], bars.high[0]) == pytest.approx((2.7, 3.0))


def test_goodput_without_a_search_is_the_best_seen(sweep: Results) -> None:
    panels = one(Results(runs=sweep.runs), "goodput").panels
    (bars,) = panels[0].bars
    best = [max(r.goodput or 0 for r in sweep.runs if r.label == name) for name in sweep.labels]
    assert panels[0].title == "best of the loads measured" and bars.height == tuple(best)
    per_worker = one(Results(runs=sweep.runs), "goodput", Options(per_gpu=True)).panels[0].bars[0]
    assert per_worker.height[3] == pytest.approx(best[3] / 3)


def test_ttft_against_batch_tokens(sweep: Results) -> None:
    (panel,) = one(sweep, "ttft").panels
    line = curve(panel, "256 tokens each")
    assert line.x == (256, 512, 1024, 2048, 4096)
    assert line.y == pytest.approx((50, 50, 50, 100, 200))
    assert panel.guides == (Guide("x", 4096, "4,096 tokens"),)


def test_the_knee_is_where_ttft_stays_above_twice_its_floor() -> None:
    def rows(*values: float) -> tuple[BatchRow, ...]:
        return tuple(BatchRow(2**i, 100, 1, value) for i, value in enumerate(values))

    assert knee(rows(1.0, 1.0, 2.1, 4.0)) == 400
    assert knee(rows(1.0, 3.0, 1.0, 4.0)) == 800, "one slow batch is no knee"
    assert knee(rows(1.0, 1.5, 2.0)) is None


def test_steps_and_transfers_by_their_size(tmp_path: Path) -> None:
    (tmp_path / "steps.json").write_text(json.dumps(steps_result()))
    results = load([Source(tmp_path)])
    prefill, decode, transfer = one(results, "steps").panels
    assert curve(prefill, "context 512").x == (32, 256, 1024)
    assert curve(prefill, "context 0").y == pytest.approx((0.32, 2.56, 10.24))
    assert curve(decode, "context 512").y == pytest.approx((5.01, 5.08, 5.32))
    assert curve(transfer, "KV transfer").x == (1, 4)
    assert [c.name for c in transfer.curves] == ["KV transfer"]
    assert curve(decode, "context 512").color == curve(prefill, "context 512").color

    (tmp_path / "other.json").write_text(json.dumps(steps_result("other") | {"transfer": []}))
    figure = one(load([Source(tmp_path)]), "steps")
    assert [panel.title for panel in figure.panels] == [
        "other: prefill step",
        "other: decode step",
        "tiny: prefill step",
        "tiny: decode step",
        "tiny: KV transfer",
    ]
    assert figure.columns == 1, "rows that are not alike"


def test_a_figure_that_the_results_do_not_allow_says_what_it_needs() -> None:
    with pytest.raises(PlotError, match="ttft: needs tables by `tasuki bench batch`; the results"):
        figures(Results(runs=(run(),)), Options(), "ttft")
    bare = Run(Path("a.json"), "tasuki", "a")
    with pytest.raises(PlotError, match="allow no figure"):
        figures(Results(runs=(bare,)), Options())


def test_slo_words() -> None:
    assert parse_slo("ttft=2s, tpot=50ms,itl=500us") == {"ttft": 2000, "tpot": 50, "itl": 0.5}
    assert parse_slo("") == {}
    for wrong in ("ttft=2", "ttft=0s", "tptf=2s", "ttft"):
        with pytest.raises(PlotError, match=f"--slo {wrong}: "):
            parse_slo(wrong)


def test_the_command_lines_slo_wins(sweep: Results) -> None:
    (panel,) = one(sweep, "pareto", Options(slo_ms={"tpot": 12.0})).panels
    assert panel.guides == (Guide("x", 12.0, "SLO 12 ms"),)
    assert not one(sweep, "pareto", Options(slo_ms={"ttft": 9.0})).panels[0].guides


def test_mixed_meanings_of_ttft_are_noted(sweep: Results) -> None:
    results = Results(runs=(replace(run(), ttft_from="sent"), replace(run("b"), ttft_from="due")))
    note = one(results, "pareto", Options(against=Against.ttft)).note
    assert "from when a request was due in Tasuki's files, from sending in others" in note


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0.0, "0"),
        (4.567, "4.57"),
        (123.4, "123"),
        (12345.6, "12,300"),
        (999.6, "1,000"),
    ],
)
def test_numbers_are_short(value: float | None, text: str) -> None:
    assert number(value) == text


def test_roles_stand_below_load_and_goodput(tmp_path: Path) -> None:
    part = {"at_s": 0.0, "offered": 20.0, "good": 18.0, "prefill": 1, "decode": 3, "mixed": 0}
    later = part | {"at_s": 2.0, "good": 20.0, "prefill": 2, "decode": 2}
    runs = [{"name": "static", "timeline": []}, {"name": "follow", "timeline": [part, later]}]
    rows = [{"workers": 4, "load": "swinging", "runs": runs}]
    path = tmp_path / "roles_follow.json"
    path.write_text(json.dumps({"schema": "tasuki.bench/1", "kind": "roles_follow", "rows": rows}))
    figure = one(load([Source(path)]), "roles")
    assert figure.subtitle == "4 workers, swinging load: follow"
    above, below = figure.panels
    assert isinstance(above, Panel) and isinstance(below, Panel)
    assert curve(above, "good").y == (18.0, 20.0)
    assert curve(below, "prefill").y == (1.0, 2.0) and curve(below, "prefill").step
