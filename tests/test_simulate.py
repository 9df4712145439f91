"""`tasuki simulate` through the extension: what it prints and writes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.planning import LOAD, RATES, steps_file
from support.processes import environment
from support.waiting import until

from tasuki import _native
from tasuki.plot.load import Source, load


def test_a_run_is_reported_as_bench_serve_reports_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "run.json"
    arguments = ["--prefill", "1", "--decode", "1", "--strict-roles", "--rates", RATES, *LOAD]
    assert _native.run_simulate([*arguments, "--output", str(output)]) == 0
    printed = capfd.readouterr().out
    assert "Successful requests:                     60" in printed
    assert "60 of 60 requests were split" in printed
    result = json.loads(output.read_text())
    assert result["schema"] == "tasuki.bench/1"
    assert result["metrics"]["completed"] == 60
    assert result["metrics"]["ttft_ms"]["median"] > 15  # 500 tokens of 20 us, and a step
    assert {len(times) for times in result["requests"]["chunk_s"]} == {50}


def test_json_is_all_that_is_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "run.json"
    words = ["--rates", RATES, *LOAD, "--json", "--output", str(output)]
    assert _native.run_simulate(words) == 0
    assert json.loads(capfd.readouterr().out)["metrics"]["completed"] == 60
    assert output.exists()


def test_roles_follow_the_load_and_more_requests_are_answered(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rates = "step-ms=2.63,sequence-us=13.8,kv-token-ns=30.4,prompt-step-ms=2.63,prompt-token-us=14"
    words = ["--mixed", "2", "--strict-roles", "--rates", rates, "--seed", "1"]
    words += ["--ttft-target-ms", "2000", "--tpot-target-ms", "8"]
    words += ["--lengths", "5000:250", "--num-requests", "300", "--request-rate", "13"]
    completed = {}
    for roles in ("fixed", "follow"):
        output = tmp_path / f"{roles}.json"
        assert _native.run_simulate([*words, "--roles", roles, "--output", str(output)]) == 0
        changed = "from mixed to prefill:" in capfd.readouterr().out
        assert changed == (roles == "follow")
        completed[roles] = json.loads(output.read_text())["metrics"]["completed"]
    assert completed["follow"] > completed["fixed"]


def test_prompts_wait_less_where_tokens_have_time_by_the_objective(tmp_path: Path) -> None:
    words = ["--prefill", "1", "--decode", "1", "--no-admission", "--itl-target-ms", "40"]
    words += ["--rates", RATES, "--lengths", "2000:200", "--num-requests", "300"]
    ttft_ms = {}
    for target in ([], ["--tpot-target-ms", "60"]):
        output = tmp_path / "run.json"
        words_all = [*words, "--request-rate", "16", *target, "--output", str(output)]
        assert _native.run_simulate(words_all) == 0
        metrics = json.loads(output.read_text())["metrics"]
        assert metrics["completed"] == 300 and metrics["tpot_ms"]["p95"] < 60
        ttft_ms[bool(target)] = metrics["ttft_ms"]["mean"]
    assert ttft_ms[True] < 0.95 * ttft_ms[False]


def test_plot_reads_what_simulate_writes(tmp_path: Path) -> None:
    output = tmp_path / "run.json"
    assert _native.run_simulate(["--rates", RATES, *LOAD, "--output", str(output)]) == 0
    (run,) = load([Source(output)]).runs
    assert run.completed == 60


def test_what_cannot_be_simulated_is_refused_by_name(capfd: pytest.CaptureFixture[str]) -> None:
    assert _native.run_simulate(LOAD) == 1
    assert "--steps FILE" in capfd.readouterr().err
    assert _native.run_simulate(["--rates", RATES, "--workload", "prompts"]) == 1
    assert "cannot be simulated" in capfd.readouterr().err
    assert _native.run_simulate(["--rates", "step-ms=x"]) == 2


def test_a_deployment_without_workers_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "run.json"
    words = ["--rates", RATES, *LOAD, "--output", str(output)]
    assert _native.run_simulate([*words, "--mixed", "0"]) == 1
    assert "0 workers are not a deployment: give --mixed N" in capfd.readouterr().err
    for workers, name in (
        (["--prefill", "1", "--decode", "1", "--mixed", "0"], "1p1d (simulated)"),
        (["--prefill", "0"], "1m (simulated)"),
    ):
        assert _native.run_simulate([*words, *workers]) == 0
        assert json.loads(output.read_text())["topology"]["name"] == name


@pytest.mark.parametrize(
    "wrong",
    [
        "--link-gb-s=0",
        "--host-link-gb-s=-1",
        "--kv-bytes-per-token=-8",
        "--message-ms=-1",
        "--handoff-ms=nan",
        "--itl-target-ms=-1",
        "--duration-s=-3",
        "--ttft-target-ms=0",
        "--role-preference=-1",
    ],
)
def test_numbers_that_mean_nothing_are_refused(
    wrong: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert _native.run_simulate(["--rates", RATES, *LOAD, wrong]) == 2
    printed = capfd.readouterr().err
    assert wrong.partition("=")[0] in printed
    assert "it must be a number" in printed


def test_the_ramp_of_a_run_is_not_measured(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As `tasuki bench serve` has it."""
    output = tmp_path / "run.json"
    words = ["--rates", RATES, "--lengths", "500:50", "--arrival", "closed", "--ramp-s", "5"]
    words += ["--max-concurrency", "8", "--output", str(output)]
    assert _native.run_simulate([*words, "--duration-s", "20"]) == 0
    window = json.loads(output.read_text())["window"]
    assert window["begin_s"] == 5.0 and window["excluded_requests"] > 0
    capfd.readouterr()
    assert _native.run_simulate([*words, "--duration-s", "4"]) == 1
    assert "--ramp-s is 5, but the last request comes after 3." in capfd.readouterr().err


def test_a_run_that_ends_before_it_settles_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    assert _native.run_simulate(["--rates", RATES, *LOAD, "--settle-s", "100"]) == 1
    printed = capfd.readouterr().err
    assert "--settle-s is 100, but the last request comes after 7." in printed
    assert "--num-requests" in printed
    assert _native.run_simulate(["--rates", RATES, *LOAD, "--settle-s", "1"]) == 0


LONG = {
    "simulate": ["--num-requests", "100000000", "--request-rate", "8"],
    "plan": ["--gpus", "64", "--slo", "ttft=10s,tpot=50ms", "--probe-requests", "100000"],
}


@pytest.mark.system
@pytest.mark.parametrize("command", LONG)
def test_ctrl_c_ends_a_run(command: str) -> None:
    words = [sys.executable, "-m", "tasuki", command, "--rates", RATES, "--lengths", "500:50"]
    run = subprocess.Popen(
        [*words, *LONG[command]],
        env=environment(),
        stdout=subprocess.DEVNULL,
        # Not ignored, as it is where the tests run in the background of a shell.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    caught: list[bool] = []

    def is_native() -> bool:
        """Python, which catches the signal, has left it to the system."""
        assert run.poll() is None, "it has ended by itself"
        status = Path(f"/proc/{run.pid}/status").read_text()
        mask = int(status.partition("SigCgt:")[2].split()[0], 16)
        caught.append(bool(mask & 1 << (signal.SIGINT - 1)))
        return any(caught) and not caught[-1]

    try:
        until(is_native, "the run", deadline_s=30.0)
        run.send_signal(signal.SIGINT)
        assert run.wait(10) == -signal.SIGINT
    finally:
        run.kill()
        run.wait()


def test_the_help_names_one_default(capfd: pytest.CaptureFixture[str]) -> None:
    assert _native.run_simulate(["--help"]) == 0
    printed = capfd.readouterr().out.partition("--mixed <N>")[2].partition("--strict-roles")[0]
    assert printed.count("[default:") == 1


def test_what_lies_between_steps_makes_every_token_later(tmp_path: Path) -> None:
    between = [{"batch": 1, "seconds": 0.002}, {"batch": 9, "seconds": 0.002}]
    tpot = {}
    for name, more in (("without", {}), ("with", {"between": between})):
        steps, output = steps_file(tmp_path / f"{name}.json", **more), tmp_path / "run.json"
        words = ["--steps", str(steps), "--lengths", "64:50", "--num-requests", "3"]
        words += ["--max-concurrency", "1", "--output", str(output)]
        assert _native.run_simulate(words) == 0
        tpot[name] = json.loads(output.read_text())["metrics"]["tpot_ms"]["median"]
    assert tpot["without"] == pytest.approx(10.0, rel=1e-3)
    assert tpot["with"] == pytest.approx(12.0, rel=1e-3)


def test_messages_that_were_measured_make_the_first_token_later(tmp_path: Path) -> None:
    found = {}
    rows = [{"batch": 1, "seconds": 0.5}, {"batch": 8, "seconds": 0.02}]
    for name, more, words in (
        ("unsaid", {}, []),
        ("measured", {"messages": rows}, []),  # beside as many sequences as was measured
        ("by hand", {"messages": rows}, ["--message-ms", "1"]),
    ):
        steps, output = steps_file(tmp_path / "steps.json", **more), tmp_path / "run.json"
        said = ["--steps", str(steps), "--lengths", "64:50", "--num-requests", "3", *words]
        assert _native.run_simulate([*said, "--output", str(output)]) == 0
        found[name] = json.loads(output.read_text())["metrics"]["ttft_ms"]["median"]
    assert found["measured"] - found["by hand"] == pytest.approx(2 * (10 - 1))
    assert found["unsaid"] - found["by hand"] == pytest.approx(2 * (2 - 1))  # on a processor


def test_a_lone_prompt_that_was_measured_says_how_early_prompts_must_come(tmp_path: Path) -> None:
    mean = {}
    launch = [{"batch": 1, "seconds": 0.0003}]  # and 1.7 ms in reserve
    lone = [{"tokens": 64, "batch": 4, "context": 64, "seconds": 0.005 + 0.01064 + 0.006}]
    for name, more in (("launch", {}), ("lone", {"lone": lone})):
        on_gpu = {"machine": {"gpus": ["a GPU"]}, "launch": launch}
        steps, output = steps_file(tmp_path / "steps.json", **on_gpu, **more), tmp_path / "run.json"
        words = ["--steps", str(steps), "--lengths", "64:100", "--num-requests", "2000"]
        words += ["--request-rate", "30", "--output", str(output)]
        assert _native.run_simulate(words) == 0
        mean[name] = json.loads(output.read_text())["metrics"]["ttft_ms"]["mean"]
    assert mean["lone"] - mean["launch"] == pytest.approx(6 - 2, rel=0.1)


def test_steps_that_only_decode_are_padded_to_the_rows_that_a_worker_has_graphs_for(
    tmp_path: Path,
) -> None:
    decode = [{"batch": n, "context": 64, "seconds": 0.001 * n} for n in (1, 64)]
    tpot_ms = {}
    for name, more in (("as they are", {}), ("padded", {"decode_rows": [1, 32, 48, 64]})):
        steps = steps_file(tmp_path / "steps.json", decode=decode, **more)
        output = tmp_path / "run.json"
        words = ["--steps", str(steps), "--lengths", "64:50", "--num-requests", "36"]
        words += ["--arrival", "closed", "--max-concurrency", "36", "--output", str(output)]
        assert _native.run_simulate(words) == 0
        tpot_ms[name] = json.loads(output.read_text())["metrics"]["itl_ms"]["median"]
    assert tpot_ms["as they are"] == pytest.approx(36, rel=0.02)
    assert tpot_ms["padded"] == pytest.approx(48, rel=0.02)


def test_a_result_says_how_many_workers_and_gpus_there_are(tmp_path: Path) -> None:
    """As a sweep does, so that both are drawn for each GPU, or for each worker of a processor."""
    of_cpu, output = steps_file(tmp_path / "steps.json"), tmp_path / "run.json"
    workers = ["--prefill", "1", "--decode", "1", *LOAD, "--output", str(output)]
    for source, gpus in ((["--steps", str(of_cpu)], 0), (["--rates", RATES], 2)):
        assert _native.run_simulate([*source, *workers]) == 0
        topology = json.loads(output.read_text())["topology"]
        assert (topology["workers"], topology["gpus"]) == (2, gpus), source


def test_steps_whose_measurement_was_interrupted_or_failed_are_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for interrupted in (True, False):
        steps = steps_file(tmp_path / "steps.json", interrupted=interrupted)
        assert _native.run_simulate(["--steps", str(steps), *LOAD]) == 0
        assert ("was interrupted" in capfd.readouterr().out) == interrupted
    for failed in ("out of memory", None):
        steps = steps_file(tmp_path / "steps.json", failed=failed)
        assert _native.run_simulate(["--steps", str(steps), *LOAD]) == 0
        said = "the measurement failed, so steps may be missing: out of memory"
        assert (said in capfd.readouterr().out) == (failed is not None)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"kind": "serve"}, 'its kind is "serve"'),
        ({"engine": {"block_size_tokens": 0, "block_bytes": 1, "num_blocks": 9}}, "no size"),
        ({"decode": [{"batch": 0, "context": 1, "seconds": 1}]}, "a step of 0 with 1 before it"),
        ({"prefill": []}, "--prefill-tokens"),
    ],
)
def test_a_file_that_is_no_step_table_is_refused(
    tmp_path: Path, more: dict[str, object], says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    steps = steps_file(tmp_path / "steps.json", **more)
    assert _native.run_simulate(["--steps", str(steps), *LOAD]) == 1
    assert says in capfd.readouterr().err
