"""What the readers make of each tool's file: hand-written after the real formats."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from plot_synthetic import serve_result, write_sweep

from tasuki.plot.load import Source, load
from tasuki.plot.run import Load, Results, Run

FIXTURES = Path(__file__).parent / "fixtures"


def read(path: Path) -> Results:
    return load([Source(path)])


def only(path: Path) -> Run:
    (run,) = read(path).runs
    return run


def test_ours(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    data = serve_result("1p1d", 1, 1, 0, 4.0, count=40)
    path.write_text(json.dumps(data))
    run = only(path)
    assert (run.tool, run.label, run.model) == ("tasuki", "1p1d", "smollm2-135m-instruct")
    assert run.workload == "random 512:64, range_ratio=0.5, range_convention=vllm"
    assert (run.load.rate, run.load.concurrency, run.load.text) == (4.0, None, "4/s")
    assert run.output_throughput == data["metrics"]["output_throughput"]
    assert run.ttst.p99 == data["metrics"]["ttst_ms"]["p99"]
    assert run.slo_ms == {"ttft": 1000.0, "tpot": 30.0}
    assert run.topology.workers == 2 and run.topology.gpus is None
    assert run.phases["prefill_ms"].mean == data["metrics"]["phases"]["prefill_ms"]["mean"]
    assert run.phases["client_queue_ms"].mean == pytest.approx(0.2)
    assert len(run.requests) == 40 and sum(r.measured for r in run.requests) == 38
    # A request's own latencies lead to the file's statistics.
    measured = [r for r in run.requests if r.measured]
    for name in ("ttft", "ttst", "tpot", "e2e"):
        mean = sum(r.latency_ms(name) or 0 for r in measured) / len(measured)
        assert mean == pytest.approx(data["metrics"][f"{name}_ms"]["mean"], rel=1e-4)


def test_a_closed_loop_and_nulls(tmp_path: Path) -> None:
    data = serve_result("2m", 0, 0, 2, 4.0, count=30)
    data["arrival"] = {"kind": "closed", "rate": None, "max_concurrency": 32}
    data |= {"slo": None, "topology": None, "label": None}
    data["metrics"] |= {"goodput": None, "itl_ms": None, "phases": None}
    data["requests"] |= {"phases": None, "chunk_s": [[]] * 30, "chunk_tokens": [[]] * 30}
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "a.json").write_text(json.dumps(data))
    run = only(tmp_path)
    assert run.label == "mine"
    assert run.load.text == "c=32"
    assert run.goodput is None and not run.slo_ms and not run.phases and run.itl.mean is None


def test_gaps_count_tokens_not_chunks(tmp_path: Path) -> None:
    data = serve_result("1p1d", 1, 1, 0, 4.0, count=25)
    data["requests"]["chunk_s"][3] = [1.0, 1.5, 1.6]
    data["requests"]["chunk_tokens"][3] = [1, 3, 1]
    (tmp_path / "a.json").write_text(json.dumps(data))
    gaps = list(only(tmp_path / "a.json").requests[3].gaps_ms())
    assert gaps == pytest.approx([500.0, 0.0, 0.0, 100.0])


def test_vllm_detailed() -> None:
    run = only(FIXTURES / "vllm" / "detailed.json")
    assert (run.tool, run.label, run.model) == ("vllm", "detailed", "Qwen/Qwen3-4B")
    assert run.load == Load(concurrency=8)
    assert (run.completed, run.failed, run.goodput) == (2, 1, 0.5)
    assert (run.output_throughput, run.total_throughput, run.input_throughput) == (4, 154, 150)
    assert (run.ttft.mean, run.ttft.p99, run.e2e.p99, run.itl.median) == (200, 298, 358, 20)
    assert run.ttst.mean == pytest.approx((120 + 350) / 2), "from the requests"
    assert run.ttft_from == "sent" and run.timed
    first, second, third = run.requests
    assert (first.sent_s, second.sent_s) == (0.0, 0.5)
    assert first.latency_ms("ttft") == pytest.approx(100)
    assert first.latency_ms("tpot") == pytest.approx(20)
    assert second.latency_ms("ttst") == pytest.approx(350)
    assert second.chunk_tokens == (pytest.approx(4 / 3),) * 3
    assert third.error == "Internal Server Error" and not third.measured


def test_vllm_without_details_and_with_a_label() -> None:
    run = only(FIXTURES / "vllm" / "plain.json")
    assert (run.label, run.load.text, run.requests, run.timed) == ("tp2", "4/s", (), False)


def test_the_goodput_of_earlier_versions_of_vllm(tmp_path: Path) -> None:
    data = json.loads((FIXTURES / "vllm" / "plain.json").read_text())
    data["request_goodput:"] = data.pop("request_goodput")
    (tmp_path / "old.json").write_text(json.dumps(data))
    assert only(tmp_path / "old.json").goodput == 0.5
    data["request_goodput"] = 0.0
    (tmp_path / "old.json").write_text(json.dumps(data))
    assert only(tmp_path / "old.json").goodput == 0.0


def test_sglang_one_run_a_line() -> None:
    first, second = read(FIXTURES / "sglang").runs
    assert (first.tool, first.label) == ("sglang", "sglang")
    said = "random 1024:1024, range_ratio=0.5, range_convention=sglang"
    assert first.workload == said == second.workload
    assert first.model == "meta-llama/Llama-3.1-8B-Instruct"
    assert (first.load.text, second.load.text) == ("2/s", "c=16")
    assert (first.output_throughput, first.total_throughput) == (1400, 3000)
    assert (first.e2e.mean, first.ttft.p90, first.itl.p99) == (4000, 150, 12.2)
    assert not first.requests and len(second.requests) == 2
    assert second.requests[0].latency_ms("e2e") == pytest.approx(220)
    assert not second.timed, "SGLang's files do not say when a request was sent"


def test_genai_bench() -> None:
    run = only(FIXTURES / "genai_bench")
    assert (run.tool, run.workload, run.load.text) == ("genai-bench", "D(100,100)", "c=4")
    assert (run.model, run.machine, run.topology.gpus) == ("Llama-3.1-8B", "H100", 2)
    assert (run.completed, run.failed, run.output_throughput) == (2, 1, 20.0)
    assert run.ttft.mean == pytest.approx(200) and run.tpot.median == pytest.approx(9)
    assert run.e2e.p99 == pytest.approx(1.9 * 1200)
    assert [r.error for r in run.requests] == [None, None, "boom"]
    assert run.requests[0].latency_ms("tpot") == pytest.approx(10)


def test_genai_bench_in_milliseconds(tmp_path: Path) -> None:
    source = next((FIXTURES / "genai_bench").glob("D100*.json"))
    data = json.loads(source.read_text())
    data["_time_unit"] = "ms"
    (tmp_path / source.name).write_text(json.dumps(data))
    run = only(tmp_path)
    assert run.ttft.mean == pytest.approx(0.2)
    assert run.requests[0].latency_ms("ttft") == pytest.approx(0.15)
    assert run.topology.gpus is None, "no metadata beside it"


def test_aiperf_files_of_one_run_are_one_run() -> None:
    results = read(FIXTURES / "aiperf")
    (run,) = results.runs
    assert [path.name for path in results.skipped] == ["inputs.json"]
    assert (run.tool, run.label, run.model) == ("aiperf", "aiperf", "openai/gpt-oss-20b")
    assert run.load == Load(rate=1.5, concurrency=32)
    assert (run.completed, run.failed, run.goodput) == (2, 1, 0.5)
    assert (run.output_throughput, run.total_throughput) == (5.0, 555.0)
    assert (run.ttft.mean, run.tpot.mean, run.e2e.p90) == (100.0, 12.5, 225.0)
    assert run.slo_ms == {"ttft": 120.0, "e2e": 500.0}
    assert len(run.requests) == 3, "warm-up is left out"
    assert run.requests[1].sent_s == pytest.approx(0.5)
    # Our TTST counts from sending; theirs is 10 ms, from the first token.
    assert run.ttst.mean == pytest.approx((90 + 135) / 2)


def test_aiperf_records_alone(tmp_path: Path) -> None:
    source = FIXTURES / "aiperf" / "profile_export.jsonl"
    (tmp_path / source.name).write_text(source.read_text())
    run = only(tmp_path)
    assert (run.completed, run.failed) == (2, 1)
    assert run.ttft.mean == pytest.approx(100)
    # The failed request was sent at 1 s and holds no end: the run lasts until 0.67 s.
    assert run.duration_s == pytest.approx(0.67)
    assert run.output_throughput == pytest.approx(10 / 0.67)


def test_aiperf_csv_alone() -> None:
    run = only(FIXTURES / "aiperf_old")
    assert (run.completed, run.request_throughput, run.output_throughput) == (200, 13.16, 1274.63)
    assert (run.ttft.median, run.tpot.p99, run.duration_s) == (787.54, 55.87, 15.20)
    assert run.input_throughput == pytest.approx(550 * 13.16)


def test_a_sweep_is_read_to_any_depth(tmp_path: Path) -> None:
    results = read(write_sweep(tmp_path / "deep" / "sweep", rates=(1, 2), count=30))
    assert results.labels == ("1p1d", "1p2d", "2p1d", "3m")
    assert len(results.runs) == 8 and len(results.searches) == 4 and len(results.batches) == 1
    assert results.searches[0].points[1].attainment == 1.0
    assert results.batches[0].rows[0].ttft_s == 0.05
    assert not results.skipped
