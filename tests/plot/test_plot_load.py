"""What cannot be used is one error that names the file and the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from plot_synthetic import batch_result, serve_result, steps_result

from tasuki.plot.errors import PlotError, ResultFileError
from tasuki.plot.load import Source, load

FIXTURES = Path(__file__).parent / "fixtures"


def written(folder: Path, content: str | dict[str, Any], name: str = "bad.json") -> Path:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def refused(path: Path) -> str:
    with pytest.raises(ResultFileError) as caught:
        load([Source(path)])
    message = str(caught.value)
    assert message.startswith(f"{caught.value.path}: ") and "\n" not in message
    return caught.value.reason


def test_no_json(tmp_path: Path) -> None:
    written(tmp_path, '{"schema": "tasuki.bench/1", ')
    assert refused(tmp_path).startswith("is not JSON: ")


@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
def test_json_that_is_too_deep(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_text("[" * 100_000)
    with pytest.raises(ResultFileError, match=rf"{name}: is not JSON: maximum recursion depth"):
        load([Source(file)])


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.symlink_to("/proc/self/mem")
    for source in (file, tmp_path):
        with pytest.raises(ResultFileError, match=r"a\.json: cannot be read: Input/output error"):
            load([Source(source)])


def test_another_schema(tmp_path: Path) -> None:
    path = written(tmp_path, {"schema": "tasuki.bench/2", "kind": "serve"})
    assert refused(path) == "schema is 'tasuki.bench/2', this version reads 'tasuki.bench/1'"


def test_a_missing_number(tmp_path: Path) -> None:
    data = serve_result("1p1d", 1, 1, 0, 4.0, count=25)
    del data["metrics"]["output_throughput"]
    assert refused(written(tmp_path, data)) == "metrics.output_throughput is missing"


def test_text_for_a_number(tmp_path: Path) -> None:
    data = serve_result("1p1d", 1, 1, 0, 4.0, count=25)
    data["metrics"]["ttft_ms"]["p99"] = "fast"
    assert refused(written(tmp_path, data)) == "metrics.ttft_ms.p99 should be a number, is 'fast'"


def test_columns_of_unequal_length(tmp_path: Path) -> None:
    data = serve_result("1p1d", 1, 1, 0, 4.0, count=25)
    data["requests"]["end_s"].pop()
    assert refused(written(tmp_path, data)) == "requests.end_s has 24 entries, not 25"


def test_chunks_without_counts(tmp_path: Path) -> None:
    data = serve_result("1p1d", 1, 1, 0, 4.0, count=25)
    data["requests"]["chunk_tokens"][7] = [1]
    assert "request 7 has" in refused(written(tmp_path, data))


def test_text_in_a_column(tmp_path: Path) -> None:
    data = serve_result("1p1d", 1, 1, 0, 4.0, count=25)
    data["requests"]["first_s"][2] = "soon"
    assert refused(written(tmp_path, data)) == "requests.first_s should hold numbers, holds 'soon'"


@pytest.mark.parametrize(
    ("column", "row", "value", "says"),
    [
        ("chunk_s", 2, None, "requests.chunk_s should hold numbers, holds None"),
        ("chunk_tokens", 1, None, "requests.chunk_tokens should hold numbers, holds None"),
        ("chunk_tokens", 1, 1e300, "requests.chunk_tokens should hold numbers of at most 1e+07, "),
        ("first_s", None, 10**400, "requests.first_s should hold numbers, holds 10000000000"),
    ],
    ids=["no time", "no count", "too many", "too large"],
)
def test_numbers_that_no_run_has(
    tmp_path: Path, column: str, row: int | None, value: float | None, says: str
) -> None:
    data = serve_result("1p1d", 1, 1, 0, 4.0, count=25)
    values = data["requests"][column]
    (values if row is None else values[row])[0] = value
    assert refused(written(tmp_path, data)).startswith(says)


def test_a_machine_may_be_told_in_numbers(tmp_path: Path) -> None:
    data = serve_result("1p1d", 1, 1, 0, 4.0, count=25)
    data["machine"]["gpus"] = [1, None]
    assert load([Source(written(tmp_path, data))]).runs[0].machine == "1, None"


def test_a_gap_of_another_tool_that_is_not_known(tmp_path: Path) -> None:
    data = json.loads((FIXTURES / "vllm" / "detailed.json").read_text())
    data["itls"][0][1] = None
    assert refused(written(tmp_path, data)) == "itls should hold numbers, holds None"


def test_a_step_that_takes_no_time_is_refused(tmp_path: Path) -> None:
    data = steps_result()
    data["decode"][1]["seconds"] = 0
    assert refused(written(tmp_path, data)) == "decode[1].seconds should be above 0, is 0"
    data["decode"][1]["seconds"] = 10**400
    assert "of at most 1e+24" in refused(written(tmp_path, data))


def test_a_named_file_that_is_no_result(tmp_path: Path) -> None:
    assert refused(written(tmp_path, {"a": 1})).startswith("is not a result of tasuki bench, ")
    assert refused(written(tmp_path, "a,b\n1,2\n", "t.csv")).startswith("is not a result of ")


def test_a_named_result_of_a_kind_without_a_picture(tmp_path: Path) -> None:
    path = written(tmp_path, {"schema": "tasuki.bench/1", "kind": "gpu_steps"})
    assert refused(path) == "has no result of a kind that has a picture"


def test_half_a_file_of_aiperf(tmp_path: Path) -> None:
    path = written(tmp_path, "Metric,avg,min\nRequest Latency (ms),x,1\n", "profile.csv")
    assert refused(path) == "Request Latency: could not convert string to float: 'x'"


def test_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(PlotError, match=r"no result of .* \(looked at 0 files\)"):
        load([Source(tmp_path)])


def test_a_folder_of_other_things(tmp_path: Path) -> None:
    written(tmp_path, "[1, 2]")
    with pytest.raises(PlotError, match=r"looked at 1 files"):
        load([Source(tmp_path)])


def test_other_files_beside_results_are_skipped(tmp_path: Path) -> None:
    written(tmp_path, batch_result(), "batch.json")
    other = written(tmp_path, {"a": 1})
    (tmp_path / "batch.log").write_text("what the run printed\n", encoding="utf-8")
    assert load([Source(tmp_path)]).skipped == (other,), "a run's own log is no stranger"


def test_words_of_the_command_line(tmp_path: Path) -> None:
    path = written(tmp_path, serve_result("1p1d", 1, 1, 0, 4.0, count=25), "a.json")
    assert Source.parse(str(path)) == Source(path)
    (run,) = load([Source.parse(f"split@4={path}")]).runs
    assert (run.label, run.topology.gpus, run.topology.workers) == ("split", 4, 2)
    (run,) = load([Source.parse(f"split={path}")]).runs
    assert (run.label, run.topology.gpus) == ("split", None)
    odd = tmp_path / "x=1"
    odd.mkdir()
    assert Source.parse(str(odd)).label == "", "a path that exists is a path"
    with pytest.raises(PlotError, match="no such file or folder"):
        Source.parse(str(tmp_path / "gone"))
    with pytest.raises(PlotError, match="a number above 0, not 'two'"):
        Source.parse(f"a@two={path}")
