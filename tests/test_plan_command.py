"""`tasuki plan` through the extension: what it prints and writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from support.planning import LOAD, RATES, main

from tasuki import _native
from tasuki.cli import app
from tasuki.models.fetch import FetchError
from tasuki.plot.load import Source, load


@pytest.mark.parametrize("wrong", ["--attainment=1.5", "--attainment=0", "--request-rate=-1"])
def test_goals_that_mean_nothing_are_refused(wrong: str, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["--gpus", "2", "--slo", "ttft=1s,tpot=20ms", "--rates", RATES, *LOAD[:2]]
    assert _native.run_plan([*words, wrong]) == 2
    assert "it must be a number" in capfd.readouterr().err


def write_config(folder: Path) -> None:
    """Of Qwen3-4B's shape."""
    config = {"hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32}
    config |= {"vocab_size": 151_936, "intermediate_size": 9728, "num_key_value_heads": 8}
    (folder / "config.json").write_text(json.dumps(config))


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
    words = ["--gpus", "4", "--lengths", "1000:250", "--slo", "ttft=2s,tpot=25ms", "--rates", rates]
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
    write_config(tmp_path)
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
    write_config(tmp_path)
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


def test_the_nearest_design_is_shown_and_drawn_where_none_meets_the_objectives(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two GPUs in one worker come nearer to half a millisecond a token than two workers."""
    write_config(tmp_path)
    output, picture = tmp_path / "plan.json", tmp_path / "plan.png"
    words = ["--gpus", "2", "--gpu", "h200", "--model", str(tmp_path), "--lengths", "500:50"]
    words += ["--probe-requests", "50", "--slo", "ttft=1s,tpot=0.5ms"]
    words += ["--output", str(output), "--plot", str(picture)]
    assert main(["plan", *words]) == 1
    plan = json.loads(output.read_text())
    tpots = {found["name"]: found["at"]["tpot_p95_ms"] for found in plan["simulated"]}
    assert tpots["1 mixed x2"] < 0.8 * tpots["2 mixed"]
    assert plan["best"]["name"] == "1 mixed x2"
    assert "the nearest is shown at the lowest: 1 mixed x2" in capfd.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")
    picture.unlink()
    assert main(["plan", *words, "--price", "h100=3"]) == 1
    assert not picture.exists(), "the file is of an earlier plan"


@pytest.mark.parametrize("glued", ["-o", "-o="])
def test_a_plan_is_drawn_from_a_path_that_follows_its_option_at_once(
    glued: str, tmp_path: Path
) -> None:
    picture = tmp_path / "plan.png"
    words = ["--quick", "--gpus", "2", "--slo", "ttft=1s,tpot=20ms", "--rates", RATES, *LOAD[:2]]
    assert main(["plan", *words, f"{glued}{tmp_path}/plan.json", "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


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
