"""`tasuki simulate` and `tasuki plan` through the extension: what they print and write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tasuki import _native
from tasuki.cli import app
from tasuki.plot.load import Source, load


def main(words: list[str]) -> int:
    """The exit code of a command of `tasuki`."""
    with pytest.raises(SystemExit) as ended:
        app(words)
    return int(ended.value.code or 0)


RATES = "step-ms=5,sequence-us=20,kv-token-ns=45,prompt-step-ms=5,prompt-token-us=20"
LOAD = ["--lengths", "500:50", "--num-requests", "60", "--request-rate", "8"]


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


def test_a_plan_says_costs_and_losses_and_is_drawn(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    output, picture = tmp_path / "plan.json", tmp_path / "plan.png"
    words = ["--gpus", "2", "--slo", "ttft=1s,tpot=20ms", "--rates", RATES]
    words += ["--lengths", "500:50", "--probe-requests", "50", "--designs", "1"]
    words += ["--price", "3.6", "--output", str(output)]
    assert main(["plan", *words, "--plot", str(picture)]) == 0
    printed = capfd.readouterr().out
    assert "a million output tokens cost" in printed
    plan = json.loads(output.read_text())
    best = plan["best"]
    # Two GPUs of 3.6 an hour, and 50 tokens a request.
    assert best["cost_per_million_tokens"] == pytest.approx(1e6 * 7.2 / 3600 / best["rate"] / 50)
    roles = [role for role in ("prefill", "decode", "mixed") if best["design"][role]["workers"]]
    assert [loss["role"] for loss in plan["losses"]] == roles
    for loss in plan["losses"]:
        assert 0 < loss["rate"] < best["rate"]
        assert f"without one {loss['role']} worker: {loss['rate']:.2f} requests/s" in printed
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main(["plan", *words[:-4], "--price", "h200=3"]) == 1
    assert "the GPUs are rates" in capfd.readouterr().err


def test_a_plan_names_the_design_and_its_command(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "plan.json"
    arguments = ["--gpus", "2", "--slo", "ttft=1s,tpot=20ms", "--rates", RATES]
    arguments += ["--lengths", "500:50", "--probe-requests", "60", "--no-variations"]
    assert _native.run_plan([*arguments, "--output", str(output)]) == 0
    assert "start it: tasuki serve --" in capfd.readouterr().out
    plan = json.loads(output.read_text())
    assert plan["best"]["rate"] > 0
    assert plan["best"]["rate"] * 1.06 >= max(found["rate"] for found in plan["simulated"])
    assert plan["best_colocated"]["name"] == "2 mixed"
    assert plan["expected"]["attainment"] >= 0.9
