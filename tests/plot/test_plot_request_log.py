"""A router's request log, drawn alone and beside a run that was simulated from it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from plot_synthetic import serve_result

from tasuki.plot.errors import ResultFileError
from tasuki.plot.figures.registry import figures
from tasuki.plot.load import Source, load
from tasuki.plot.options import Options

HEADER = {"tasuki_request_log": 1, "tasuki": "0.1.0", "began_unix_s": 1.0, "router": {}}


def record(number: int) -> dict[str, object]:
    return {
        "t": 2.0 + 0.5 * number,
        "i": 512,
        "o": 11,
        "w": [0, 1],
        "q": 10.0,
        "f": 100.0 + number,
        "g": 130.0 + number,
        "e": 310.0 + number,
        "h": [1000, 2.5, 1.5],
    }


def write_log(path: Path, count: int = 20) -> Path:
    lines = [json.dumps(HEADER), json.dumps({"fleet": {"t": 0.1, "workers": [], "classes": []}})]
    lines += [json.dumps(record(number)) for number in reversed(range(count))]
    lines.append(json.dumps({"t": 30.0, "i": 9, "o": 0, "e": 4.0, "z": "refused"}))
    path.write_text("\n".join(lines) + '\n{"t": 31.0, "i": 9')  # the last one is cut off
    return path


def simulated(path: Path, log: Path) -> Path:
    data = serve_result("1p1d (simulated)", 1, 1, 0, 2.0, count=20)
    data["workload"] = {"kind": "log", "file": str(log)}
    data["arrival"] = {"kind": "log", "speed": None}
    path.write_text(json.dumps(data))
    return path


def test_a_log_is_a_run(tmp_path: Path) -> None:
    (run,) = load([Source(write_log(tmp_path / "requests.log"))]).runs
    assert (run.tool, run.label, run.workload) == ("tasuki", "requests", "log, file=requests.log")
    assert (run.completed, run.failed, run.timed) == (20, 1, True)
    first = run.requests[0]
    assert (first.due_s, first.latency_ms("ttft")) == (0.0, pytest.approx(100.0))
    assert first.latency_ms("ttst") == pytest.approx(130.0)
    assert first.latency_ms("tpot") == pytest.approx(21.0)
    # The first gap as it was, the others alike: together they end with the answer.
    assert list(first.gaps_ms()) == pytest.approx([30.0] + [20.0] * 9)
    assert first.phases_ms == {"queue_ms": 10.0, "transfer_exposed_ms": 1.5}
    assert run.requests[-1].error == "refused"
    assert run.output_throughput == pytest.approx(20 * 11 / (9.5 + 0.329))


def test_folders_are_searched_for_logs(tmp_path: Path) -> None:
    write_log(tmp_path / "requests.log")
    (tmp_path / "other.log").write_text("a line\n")
    assert len(load([Source(tmp_path)]).runs) == 1


def test_other_versions_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "requests.log"
    path.write_text(json.dumps(HEADER | {"tasuki_request_log": 7}) + "\n")
    with pytest.raises(ResultFileError, match="version 7"):
        load([Source(path)])
    path.write_text(json.dumps(HEADER) + "\n")
    with pytest.raises(ResultFileError, match="no request"):
        load([Source(path)])


@pytest.mark.parametrize("wrong", [{"o": None}, {"f": "x"}, {"t": True}, {"h": [1, 2]}, {}])
def test_a_line_with_a_wrong_value_is_left_out(tmp_path: Path, wrong: dict[str, object]) -> None:
    path = tmp_path / "requests.log"
    other = record(1) | wrong if wrong else {"t": 1.0}
    path.write_text("".join(json.dumps(line) + "\n" for line in (HEADER, record(0), other)))
    (run,) = load([Source(path)]).runs
    assert len(run.requests) == 1


def test_real_and_simulated_share_their_pictures(tmp_path: Path) -> None:
    log = write_log(tmp_path / "requests.log")
    results = load([Source(log), Source(simulated(tmp_path / "a.json", log))])
    drawn = {figure.name: figure for figure in figures(results, Options())}
    labels = ["1p1d (simulated)", "requests"]
    ttft, tpot, throughput = drawn["compare"].panels
    for panel in (ttft, tpot, throughput):
        assert sorted(curve.name for curve in panel.curves) == labels
        assert all(len(curve.x) == len(curve.y) > 2 for curve in panel.curves)
    real = next(curve for curve in ttft.curves if curve.name == "requests")
    assert real.y[0] == pytest.approx(100.0) and real.y[-1] == pytest.approx(119.0)
    inside = next(curve for curve in throughput.curves if curve.name == "requests")
    width = inside.x[1] - inside.x[0]
    assert sum(inside.y) * width == pytest.approx(20 * 11)
    for panel in drawn["cdf"].panels:
        assert sorted(curve.name for curve in panel.curves) == labels, panel.title


def test_one_run_has_nothing_beside_it(tmp_path: Path) -> None:
    results = load([Source(write_log(tmp_path / "requests.log"))])
    assert "compare" not in {figure.name for figure in figures(results, Options())}
