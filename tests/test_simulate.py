"""`tasuki simulate` and `tasuki plan` through the extension: what they print and write."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import yaml

from tasuki import _native
from tasuki.cli import app
from tasuki.models.fetch import FetchError
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


def test_a_run_that_ends_before_it_settles_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    assert _native.run_simulate(["--rates", RATES, *LOAD, "--settle-s", "100"]) == 1
    printed = capfd.readouterr().err
    assert "--settle-s is 100, but the last request comes after 7." in printed
    assert "--num-requests" in printed
    assert _native.run_simulate(["--rates", RATES, *LOAD, "--settle-s", "1"]) == 0


@pytest.mark.parametrize("command", ["simulate", "plan"])
def test_ctrl_c_ends_a_run(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def ends_at_once(_: list[str]) -> int:
        return 0 if signal.getsignal(signal.SIGINT) is signal.SIG_DFL else 1

    monkeypatch.setattr(_native, f"run_{command}", ends_at_once)
    before = signal.getsignal(signal.SIGINT)
    assert main([command]) == 0
    assert signal.getsignal(signal.SIGINT) is before


def test_the_help_names_one_default(capfd: pytest.CaptureFixture[str]) -> None:
    assert _native.run_simulate(["--help"]) == 0
    printed = capfd.readouterr().out.partition("--mixed <N>")[2].partition("--strict-roles")[0]
    assert printed.count("[default:") == 1


@pytest.mark.parametrize("wrong", ["--attainment=1.5", "--attainment=0", "--request-rate=-1"])
def test_goals_that_mean_nothing_are_refused(wrong: str, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["--gpus", "2", "--slo", "ttft=1s,tpot=20ms", "--rates", RATES, *LOAD[:2]]
    assert _native.run_plan([*words, wrong]) == 2
    assert "it must be a number" in capfd.readouterr().err


def test_a_plan_without_an_answer_says_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "plan.json"
    words = ["--gpus", "2", "--rates", RATES, "--lengths", "500:50", "--probe-requests", "50"]
    words += ["--designs", "1", "--output", str(output)]
    assert _native.run_plan([*words, "--slo", "ttft=1s,tpot=1ms"]) == 1
    printed = capfd.readouterr().out
    assert "no design meets the objectives" in printed
    assert "TPOT breaks first" in printed
    assert "start it" not in printed
    assert json.loads(output.read_text())["best"]["rate"] == 0.0


def test_a_rate_that_no_run_could_refute_is_not_promised(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Few requests are all served within loose objectives, at whatever rate they come."""
    output = tmp_path / "plan.json"
    words = ["--gpus", "2", "--rates", RATES, "--lengths", "500:50", "--num-requests", "100"]
    words += ["--designs", "1", "--no-variations", "--slo", "ttft=60s,tpot=1s"]
    assert _native.run_plan([*words, "--output", str(output)]) == 0
    best = json.loads(output.read_text())["best"]
    longest_s = 60 + 50 * 1  # of a request that just meets the objectives
    assert 0 < best["rate"] <= 100 / (0.8 * longest_s)
    assert "raise --num-requests" in best["binds"], "what was given limits the run"
    assert "prompts of 500 tokens and answers of 50" in capfd.readouterr().out


@pytest.mark.slow
def test_the_design_that_is_taken_is_in_the_table(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of designs that count as equal the simplest is taken, however many have a higher rate."""
    output = tmp_path / "plan.json"
    rates = "step-ms=2.6,sequence-us=21,kv-token-ns=22,prompt-token-us=9.6,prompt-square-ns=0.42"
    words = ["--gpus", "4", "--lengths", "2000:250", "--slo", "ttft=2s,tpot=25ms", "--rates", rates]
    words += ["--probe-requests", "200", "--designs", "8", "--no-variations"]
    assert _native.run_plan([*words, "--output", str(output)]) == 0
    plan = json.loads(output.read_text())
    name = plan["best"]["name"]
    rank = [found["design"] for found in plan["simulated"]].index(plan["best"]["design"])
    table, _ = capfd.readouterr().out.split("requests: the highest rate")
    rows = table.splitlines()[1:]
    assert rank >= 16 and len(rows) == 17
    assert rows[-1].startswith(f"{name}  ")


def test_the_degree_of_a_plan_can_be_given(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = {"hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32}
    config |= {"vocab_size": 151_936, "intermediate_size": 9728, "num_key_value_heads": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ["--gpus", "2", "--gpu", "NVIDIA H200", "--model", str(tmp_path), "--quick"]
    words += ["--slo", "ttft=2s,tpot=50ms", "--lengths", "500:50", "--tensor-parallel"]
    assert _native.run_plan([*words, "2"]) == 0
    assert f"tasuki serve --model {tmp_path} --mixed 1 --tp-mixed 2" in capfd.readouterr().out
    assert _native.run_plan([*words, "4"]) == 1
    assert "--tensor-parallel is 4: use at most --gpus (2)" in capfd.readouterr().err


@pytest.mark.parametrize("form", [["--model", "owner/model"], ["--model=owner/model"]])
def test_a_models_name_stands_for_the_folder_with_its_config(
    form: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    config = {"hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32}
    config |= {"vocab_size": 151_936, "intermediate_size": 9728, "num_key_value_heads": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(tmp_path))
    words = ["--gpu", "h200", *form, *LOAD]
    assert main(["simulate", "--mixed", "1", *words]) == 0
    assert "60" in capfd.readouterr().out
    plan = ["plan", "--gpus", "2", "--slo", "ttft=1s,tpot=20ms", "--quick", "--no-variations"]
    assert main([*plan, "--gpu", "h200", *form, *LOAD[:2]]) == 0
    assert "start it: tasuki serve --model owner/model" in capfd.readouterr().out
    with pytest.raises(FetchError, match="no model 'smollm3'"):
        app(["simulate", "--mixed", "1", "--gpu", "h200", "--model", "smollm3"])


def test_plan_alone_says_what_it_needs(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["plan"]) == 2
    assert "--slo <SLO>" in capfd.readouterr().err


def steps_file(path: Path, **more: object) -> Path:
    """Steps of 10 ms, and 10 us for each token of a prompt."""
    content: dict[str, object] = {
        "kind": "steps",
        "label": "made",
        "model": "made",
        "machine": {"gpus": []},
        "engine": {"block_size_tokens": 16, "block_bytes": 1000, "num_blocks": 4096},
        "prefill": [{"tokens": n, "context": 0, "seconds": 0.005 + 1e-5 * n} for n in (64, 512)],
        "decode": [{"batch": n, "context": 512, "seconds": 0.010} for n in (1, 64)],
    }
    path.write_text(json.dumps(content | more))
    return path


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
    twice = 2 * plan["expected"]["rate"]
    assert plan["variations"][0]["what"] == f"load doubled, {twice:.2f} requests/s"
    assert plan["variations"][0]["needs_gpus"] == 4  # of 0.8 of the highest rate, times two
    assert "all would with about 4 GPUs" in printed
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main(["plan", *words[:-4], "--price", "h200=3"]) == 1
    assert "the GPUs are rates" in capfd.readouterr().err


def test_a_plan_names_the_design_and_its_command(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "plan.json"
    arguments = ["--gpus", "2", "--slo", "ttft=1s,tpot=20ms", "--rates", RATES]
    arguments += ["--lengths", "500:50", "--probe-requests", "60", "--no-variations"]
    values = tmp_path / "values.yaml"
    assert _native.run_plan([*arguments, "--output", str(output), "--values", str(values)]) == 0
    assert "start it: tasuki serve --" in capfd.readouterr().out
    plan = json.loads(output.read_text())
    assert plan["best"]["rate"] > 0
    pools = {
        role: {
            "role": role,
            "replicas": plan["best"]["design"][role]["workers"],
            "gpus": plan["best"]["design"][role]["tensor_parallel"],
        }
        for role in ("prefill", "decode", "mixed")
        if plan["best"]["design"][role]["workers"]
    }
    written = yaml.safe_load(values.read_text())
    assert {name: pool for name, pool in written["pools"].items() if pool} == pools
    assert plan["best"]["rate"] * 1.06 >= max(found["rate"] for found in plan["simulated"])
    assert plan["best_colocated"]["name"] == "2 mixed"
    assert plan["expected"]["attainment"] >= 0.9
    assert plan["itl_target_ms"] == 0.8 * 20
    assert plan["command"].endswith(" --itl-target-ms 16")
    assert written["worker"]["args"][-2:] == ["--itl-target-ms", "16"]


def test_steps_follow_the_objective_unless_they_are_given(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "plan.json"
    words = ["--gpus", "1", "--rates", RATES, "--lengths", "2000:50", "--no-variations"]
    words += ["--probe-requests", "200", "--output", str(output)]

    def seen(slo: str, *more: str) -> tuple[float, float]:
        assert _native.run_plan([*words, "--slo", f"ttft=2s,{slo}", *more]) == 0
        plan = json.loads(output.read_text())
        return plan["itl_target_ms"], plan["best"]["rate"]

    loose, given = seen("tpot=40ms"), seen("tpot=40ms", "--itl-target-ms", "9")
    assert (loose[0], given[0]) == (32.0, 9.0)
    assert loose[1] > given[1]
    assert " 9 ms at most with prompts in it" in capfd.readouterr().out
    unbounded = seen("tpot=40ms", "--itl-target-ms", "0")
    assert unbounded[0] == 0.0
    assert "--itl-target-ms 0" in capfd.readouterr().out


def test_splits_are_tried_with_strict_roles_and_without(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "plan.json"
    words = ["--gpus", "2", "--slo", "ttft=1s,tpot=20ms", "--rates", RATES, "--lengths", "500:50"]
    words += ["--probe-requests", "60", "--no-variations", "--output", str(output)]
    four = {"1 prefill + 1 decode", "1 prefill + 1 mixed", "1 decode + 1 mixed", "2 mixed"}
    strict = {f"{name}, strict" for name in four - {"2 mixed"}}
    for more, names in (([], four | strict), (["--strict-roles"], {"2 mixed"} | strict)):
        assert _native.run_plan([*words, *more]) == 0
        simulated = json.loads(output.read_text())["simulated"]
        assert {found["name"] for found in simulated} == names
        for found in simulated:
            assert found["design"]["strict_roles"] == (found["name"] in strict)
            if found["name"] == "1 prefill + 1 decode, strict":
                assert found["at"]["split"] == 1.0
    assert "1 prefill + 1 decode, strict  " in capfd.readouterr().out


def test_the_best_split_is_tried_with_other_steps_for_prefill_workers(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "plan.json"
    words = ["--gpus", "2", "--rates", RATES, "--lengths", "2000:50", "--probe-requests", "50"]
    words += ["--strict-roles", "--designs", "4", "--no-variations"]
    assert _native.run_plan([*words, "--slo", "ttft=1s,tpot=12ms", "--output", str(output)]) == 0
    printed = capfd.readouterr().out
    simulated = json.loads(output.read_text())["simulated"]
    own = [found for found in simulated if found["design"]["prefill_max_batched_tokens"]]
    sizes = [
        (found["design"]["prefill_max_batched_tokens"], found["design"]["max_batched_tokens"])
        for found in own
    ]
    assert len(sizes) == 3
    assert len({prefill for prefill, _ in sizes}) == 3
    for prefill, others in sizes:
        assert prefill != others
        assert f" {prefill}/{others} " in printed
    (plan,) = load([Source(output)]).plans
    prefill, others = sizes[0]
    name = f"{own[0]['name']}, step {prefill}/{others}"
    assert name in {known.name for known in plan.designs}
