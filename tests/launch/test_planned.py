"""Which workers a machine with several GPUs gets where no role is given: real plans."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from tasuki.launch import command, machine
from tasuki.launch import serve as serving
from tasuki.launch.config import ServeConfig
from tasuki.launch.gpus import Gpu
from tasuki.launch.planned import _read, plan_gpus
from tasuki.launch.router_options import RouterOptions
from tasuki.worker.config import WorkerConfig

H200 = Gpu("NVIDIA H200", 150_754_820_096)
L40S = Gpu("NVIDIA L40S", 48_305_799_168)
QWEN3_4B = {
    "hidden_size": 2560,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "vocab_size": 151_936,
    "intermediate_size": 9728,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
# Of Llama 3.1's shape: 141 GB of weights.
LARGE = QWEN3_4B | {
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "vocab_size": 128_256,
    "intermediate_size": 28_672,
}


def folder(path: Path, config: dict[str, int]) -> Path:
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_two_gpus_are_two_mixed_workers_and_the_line_says_why(tmp_path: Path) -> None:
    planned = plan_gpus([H200, H200], folder(tmp_path, QWEN3_4B), WorkerConfig(), RouterOptions())
    assert str(planned.topology) == "2 mixed"
    assert planned.ranks == {"mixed": 1}
    for said in ("2 mixed: no roles are given", "2000:200", "TPOT 50 ms", "requests/s; "):
        assert said in planned.line, planned.line
    assert "best: 2 mixed" in planned.table
    assert " 9 ms at most with prompts in it" in planned.table  # as workers have it here


def test_the_plan_is_for_steps_as_the_workers_have_them(tmp_path: Path) -> None:
    model, worker = folder(tmp_path, QWEN3_4B), WorkerConfig(itl_target_ms=17.5)
    for router in (RouterOptions(), RouterOptions(tpot_target_ms=30.0)):
        planned = plan_gpus([H200, H200], model, worker, router)
        assert " 17.5 ms at most with prompts in it" in planned.table
    unbounded = plan_gpus([H200, H200], model, WorkerConfig(itl_target_ms=0.0), RouterOptions())
    assert "at most with prompts in it" not in unbounded.table
    assert "best: 2 mixed" in unbounded.table


def test_the_plan_is_for_the_limits_that_workers_have(tmp_path: Path) -> None:
    model = folder(tmp_path, QWEN3_4B)
    limits = {"block_size": 64, "max_model_len": 8192, "max_running_requests": 4}
    worker = WorkerConfig(**limits, max_batched_tokens=1024)
    few = plan_gpus([H200, H200], model, worker, RouterOptions())
    for said in ("--max-batched-tokens 1024", "--block-size 64", "--max-model-len 8192"):
        assert said in few.table, few.table
    # A worker that decodes four requests at once serves few of them.
    many = plan_gpus([H200, H200], model, WorkerConfig(), RouterOptions())
    rates = [re.search(r"([0-9.]+) requests/s", plan.line) for plan in (few, many)]
    assert rates[0] and rates[1] and float(rates[0][1]) < 0.5 * float(rates[1][1])


def test_slow_rates_keep_their_digits() -> None:
    part = {"workers": 0, "tensor_parallel": 0}
    design = {"prefill": part, "decode": part, "mixed": {"workers": 2, "tensor_parallel": 1}}

    def line(rates: tuple[float, float]) -> str:
        best = {"design": design | {"strict_roles": False}, "at_least": False}
        best |= {"name": "2 mixed", "rate": rates[0]}
        other = {"name": "1 mixed x2", "rate": rates[1]}
        return _read({"best": best, "simulated": [best, other]}, "long prompts", "").line

    assert "long prompts: 0.0312 requests/s; next is 1 mixed x2 with 0.0298 " in line(
        (0.03123, 0.02984)
    )
    assert ": 4.38 requests/s; next is 1 mixed x2 with 0.000120 " in line((4.382, 0.00012))
    assert ": 1234 requests/s; next is 1 mixed x2 with 98.8 " in line((1234.4, 98.76))


def test_a_model_too_large_for_one_gpu_gets_several(tmp_path: Path) -> None:
    planned = plan_gpus([H200] * 4, folder(tmp_path, LARGE), WorkerConfig(), RouterOptions())
    assert planned.topology is not None
    assert min(planned.ranks.values()) >= 2
    gpus = {role: getattr(planned.topology, role) * n for role, n in planned.ranks.items()}
    assert sum(gpus.values()) == 4


def test_objectives_and_strictness_are_those_of_the_router(tmp_path: Path) -> None:
    model = folder(tmp_path, QWEN3_4B)
    router = RouterOptions(ttft_target_ms=1500.0, tpot_target_ms=7.5, strict_roles=True)
    planned = plan_gpus([H200, H200], model, WorkerConfig(), router)
    assert "TTFT 1500 ms and TPOT 7.5 ms" in planned.line
    assert " 6 ms at most with prompts in it" in planned.table
    split = re.findall(r"^1 prefill \+ 1 decode(, strict)? ", planned.table, re.MULTILINE)
    assert split == [", strict"]
    impossible = plan_gpus([H200, H200], model, WorkerConfig(), RouterOptions(tpot_target_ms=0.01))
    assert impossible.topology is None
    assert "not planned: no topology serves" in impossible.line


def test_a_split_that_serves_more_with_strict_roles_gets_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = folder(tmp_path, QWEN3_4B)
    tight = RouterOptions(tpot_target_ms=20.0)
    planned = plan_gpus([L40S] * 3, model, WorkerConfig(), tight)
    assert planned.strict_roles
    assert planned.line.startswith(f"{planned.topology}")
    assert "1 decode x2, strict: no roles are given" in planned.line
    assert not plan_gpus([H200, H200], model, WorkerConfig(), tight).strict_roles

    started: list[ServeConfig] = []
    monkeypatch.setattr(machine, "describe_gpus", lambda: (L40S,) * 3)
    monkeypatch.setattr(machine, "read_one_another", lambda: True)
    monkeypatch.setattr(serving, "serve", lambda config: (started.append(config), 0)[1])
    words = ["--model", str(model), "--device", "cuda", "--tpot-target-ms", "20"]
    serve = typer.Typer()
    serve.command()(command.serve)
    assert CliRunner().invoke(serve, words).exit_code == 0
    assert started[0].router.strict_roles
    assert (started[0].topology, dict(started[0].tensor_parallel)) == (
        planned.topology,
        planned.ranks,
    )


@pytest.mark.parametrize(
    ("gpus", "says"),
    [
        ([H200, Gpu("NVIDIA L4", 24 << 30)], "several kinds"),
        ([Gpu("NVIDIA T4", 16 << 30)] * 2, "--gpu is NVIDIA T4; known are "),
        ([Gpu("NVIDIA L4", 4 << 30)] * 2, "leave no room for KV"),
    ],
)
def test_without_a_plan_the_line_says_why(tmp_path: Path, gpus: list[Gpu], says: str) -> None:
    planned = plan_gpus(gpus, folder(tmp_path, QWEN3_4B), WorkerConfig(), RouterOptions())
    assert planned.topology is None
    assert says in planned.line


def test_the_launcher_plans_two_gpus_and_shows_the_table_if_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(folder(tmp_path, QWEN3_4B))
    monkeypatch.setattr(machine, "describe_gpus", lambda: (H200,) * 3)
    monkeypatch.setattr(machine, "read_one_another", lambda: True)
    planned = machine.plan_topology(
        model, WorkerConfig(device="cuda:1"), RouterOptions(), explain=True
    )
    assert planned is not None
    assert str(planned.topology) == "2 mixed"
    said = capsys.readouterr().err
    assert "best: 2 mixed" in said
    assert "2 mixed: no roles are given" in said
    assert (
        machine.plan_topology(model, WorkerConfig(device="cuda:1"), RouterOptions(), explain=False)
        is not None
    )
    assert "best: 2 mixed" not in capsys.readouterr().err
    monkeypatch.setattr(machine, "describe_gpus", lambda: (H200,))
    assert machine.plan_topology(model, WorkerConfig(), RouterOptions(), explain=True) is None
    assert "nothing to plan: 1 GPUs" in capsys.readouterr().err
