"""A sweep over fake deployments: order, failures, resuming, interruption, search."""

from __future__ import annotations

import errno
import json
import math
import os
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from bench_fakes import FakeSystem, serve_result

from tasuki.bench import sweep_command
from tasuki.bench.errors import BenchError, NothingAnsweredError, RunFailedError
from tasuki.bench.load import LoadRun
from tasuki.bench.plan import WARMUP_SEED, Plan, load_seed
from tasuki.bench.sweep import Sweep
from tasuki.bench.sweep_file import read_sweep
from tasuki.bench.sweep_state import SweepState
from tasuki.models.cache import exclusive
from tasuki.models.fetch_errors import FetchError
from tasuki.plot.load import Source, load

TWO_BY_TWO = {
    "topologies": ["1p1d", "2m"],
    "loads": [
        {"name": "a", "arguments": {"request-rate": 1, "input-tokens": 8}},
        {"name": "b", "arguments": {"request-rate": 2}},
    ],
}
ALL = ["1p1d/a", "1p1d/b", "2m/a", "2m/b"]


def plan_of(**changes: Any) -> Plan:
    return read_sweep(None, {**TWO_BY_TWO, **changes})


def sweep(system: FakeSystem, folder: Path, plan: Plan | None = None, fresh: bool = False) -> int:
    plan = plan or plan_of()
    state = SweepState(plan, folder, fresh)
    return Sweep(plan, state, system.deploy, system.measure, lambda line: None).run()


def states(folder: Path) -> dict[str, str]:
    content = json.loads((folder / "sweep.json").read_text())
    return {key: point["state"] for key, point in content["points"].items()}


def reasons(folder: Path) -> dict[str, str | None]:
    content = json.loads((folder / "sweep.json").read_text())
    return {key: point["reason"] for key, point in content["points"].items()}


def test_every_target_is_started_once_and_runs_every_load(tmp_path: Path) -> None:
    system = FakeSystem()
    assert sweep(system, tmp_path) == 0
    assert system.names == ALL
    assert [d.target.name for d in system.deployed] == ["1p1d", "2m"]
    assert all(d.stopped for d in system.deployed)
    assert states(tmp_path) == dict.fromkeys(ALL, "done")
    run = system.runs[0]
    assert run.result == tmp_path / "1p1d" / "a.json"
    assert run.options == {"request-rate": 1, "input-tokens": 8, "seed": load_seed("a")}
    assert run.topology is not None
    assert (run.topology["name"], run.topology["prefill"]) == ("1p1d", 1)


def test_a_folder_has_one_sweep_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasuki.models.fetch.resolve_model", lambda model: Path(model))
    monkeypatch.setattr("tasuki.bench.check_loads.check_loads", lambda plan, tokenizer: None)
    monkeypatch.setattr(sweep_command, "end_like_interrupted", lambda: None)
    goal: dict[str, Any] = {"find": False, "slo": None}
    (tmp_path / "sweep.json").write_text("as the other one wrote it")
    taken = pytest.raises(BenchError, match="another sweep writes to")
    with exclusive(tmp_path / ".lock", lambda: None), taken:
        sweep_command._run(None, dict(TWO_BY_TWO), tmp_path, True, False, goal)
    assert (tmp_path / "sweep.json").read_text() == "as the other one wrote it"


def test_a_dry_run_refuses_a_model_that_no_run_could_have(tmp_path: Path) -> None:
    goal: dict[str, Any] = {"find": False, "slo": None}
    with pytest.raises(FetchError, match="no model 'nope': give 'smollm2-135m'"):
        sweep_command._run(None, {**TWO_BY_TWO, "model": "nope"}, tmp_path, False, True, goal)


def test_ctrl_c_before_the_first_start_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tasuki.models.fetch.resolve_model", lambda model: Path(model))
    monkeypatch.setattr("tasuki.bench.check_loads.check_loads", interrupt)
    monkeypatch.setattr(sweep_command, "end_like_interrupted", lambda: None)
    goal: dict[str, Any] = {"find": False, "slo": None}
    assert sweep_command._run(None, dict(TWO_BY_TWO), tmp_path, False, False, goal) == 130
    assert "interrupted; nothing was started" in "".join(capfd.readouterr())
    assert not (tmp_path / "sweep.json").exists()


def test_no_key_gets_into_the_folder(tmp_path: Path) -> None:
    system = FakeSystem()
    secrets = {"api_key": "K1", "header": ["X: K2"]}
    loads = [{"name": "a", "arguments": {"request-rate": 1, **secrets}}]
    goodput = {"slo": "ttft=1s", "arguments": secrets}
    sweep(system, tmp_path, plan_of(loads=loads, goodput=goodput))
    assert "K1" in system.runs[0].options.values()
    written = (tmp_path / "sweep.json").read_text()
    assert '"***"' in written
    assert "K1" not in written and "K2" not in written


def test_a_fresh_target_is_warmed_with_the_first_load_at_once(tmp_path: Path) -> None:
    system = FakeSystem()
    sweep(system, tmp_path, plan_of(warmup_requests=3))
    warmup = {"input-tokens": 8, "num-requests": 6, "seed": WARMUP_SEED}
    assert [dict(run.options) for run in system.warmups] == [warmup] * 2
    assert all(tmp_path not in run.result.parents for run in system.warmups)
    cold = FakeSystem()
    sweep(cold, tmp_path / "cold", plan_of(warmup_requests=0))
    assert not cold.warmups


def test_a_failed_point_is_noted_and_the_sweep_goes_on(tmp_path: Path) -> None:
    system = FakeSystem()

    def fail(run: LoadRun) -> None:
        if run.result == tmp_path / "1p1d" / "a.json":
            raise RunFailedError("no answer")

    system.on_run = fail
    assert sweep(system, tmp_path) == 1
    assert system.names == ALL
    assert len(system.deployed) == 2  # the deployment was not the reason
    assert states(tmp_path) == {**dict.fromkeys(ALL, "done"), "1p1d/a": "failed"}
    assert reasons(tmp_path)["1p1d/a"] == "no answer"


def test_a_deployment_that_dies_is_replaced_for_the_next_point(tmp_path: Path) -> None:
    system = FakeSystem()

    def die(run: LoadRun) -> None:
        if run.result == tmp_path / "1p1d" / "a.json":
            system.deployed[0].reason = "tasuki serve ended (signal SIGKILL)"
            raise RunFailedError("connection refused")

    system.on_run = die
    assert sweep(system, tmp_path) == 1
    assert [d.target.name for d in system.deployed] == ["1p1d", "1p1d", "2m"]
    assert reasons(tmp_path)["1p1d/a"] == "tasuki serve ended (signal SIGKILL)"
    assert states(tmp_path)["1p1d/b"] == "done"


@pytest.mark.parametrize("load", ["a", "goodput"])
def test_a_load_in_which_the_deployment_ended_is_no_result(tmp_path: Path, load: str) -> None:
    """Requests before its end were answered, so the load has a result."""
    system = FakeSystem()

    def die(run: LoadRun) -> Mapping[str, Any] | None:
        count = run.options.get("num-requests", 4)
        if run.log.stem == load:
            system.deployed[0].reason = "tasuki serve ended (signal SIGKILL)"
        met = [index < 0.4 * count for index in range(count)]
        return serve_result(run.label, met=met, due_s=[0.0] * count, in_window=[True] * count)

    system.on_run = die
    search = {"slo": "ttft=1s", "load": "a", "max_probes": 2, "start_rate": 100}
    assert sweep(system, tmp_path, plan_of(topologies=["1m"], goodput=search)) == 1
    assert reasons(tmp_path)[f"1m/{load}"] == "tasuki serve ended (signal SIGKILL)"
    assert states(tmp_path)[f"1m/{load}"] == "failed"
    assert not (tmp_path / "1m" / f"{load}.json").exists(), "plots would find it"


def test_a_result_that_cannot_be_written_fails_its_point_and_is_said(tmp_path: Path) -> None:
    system = FakeSystem()

    def answer(run: LoadRun) -> Mapping[str, Any]:
        if run.log.stem == "a":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/tmp/probe")
        count = run.options.get("num-requests", 4)
        window = {"due_s": [0.0] * count, "in_window": [True] * count}
        return serve_result(run.label, met=[True] * count, **window)

    system.on_run = answer
    (tmp_path / "1m" / "goodput.json").mkdir(parents=True)
    search = {"slo": "ttft=1s", "load": "a", "max_probes": 2}
    assert sweep(system, tmp_path, plan_of(topologies=["1m"], goodput=search)) == 2
    assert states(tmp_path) == {"1m/a": "failed", "1m/b": "done", "1m/goodput": "failed"}
    assert reasons(tmp_path)["1m/a"] == "[Errno 28] No space left on device: '/tmp/probe'"
    reason = str(reasons(tmp_path)["1m/goodput"])
    assert "goodput.json (Is a directory)" in reason
    assert reason.endswith("it was 2 req/s and perhaps more reach 90% (at 95% confidence)")


def test_a_target_that_does_not_come_up_fails_its_points_only(tmp_path: Path) -> None:
    system = FakeSystem()
    system.broken = {"1p1d"}
    assert sweep(system, tmp_path) == 2
    assert system.names == ["2m/a", "2m/b"]
    assert reasons(tmp_path)["1p1d/b"] == "1p1d did not come up"


def test_failed_points_are_measured_again_and_done_ones_kept(tmp_path: Path) -> None:
    broken = FakeSystem()
    broken.broken = {"2m"}
    sweep(broken, tmp_path)
    system = FakeSystem()
    assert sweep(system, tmp_path) == 0
    assert system.names == ["2m/a", "2m/b"]
    assert [d.target.name for d in system.deployed] == ["2m"]
    assert states(tmp_path) == dict.fromkeys(ALL, "done")


def test_an_interrupted_sweep_resumes_at_the_point_under_way(tmp_path: Path) -> None:
    system = FakeSystem()

    def interrupt(run: LoadRun) -> None:
        if run.result == tmp_path / "1p1d" / "b.json":
            raise KeyboardInterrupt

    system.on_run = interrupt
    with pytest.raises(KeyboardInterrupt):
        sweep(system, tmp_path)
    assert system.deployed[0].stopped
    assert states(tmp_path) == {**dict.fromkeys(ALL, "pending"), "1p1d/a": "done"}
    again = FakeSystem()
    sweep(again, tmp_path)
    assert again.names == ALL[1:]


def test_a_result_that_is_gone_or_broken_is_measured_again(tmp_path: Path) -> None:
    sweep(FakeSystem(), tmp_path)
    (tmp_path / "1p1d" / "a.json").unlink()
    (tmp_path / "2m" / "b.json").write_text("{")
    again = FakeSystem()
    sweep(again, tmp_path)
    assert again.names == ["1p1d/a", "2m/b"]


def test_a_longer_plan_keeps_what_is_there(tmp_path: Path) -> None:
    sweep(FakeSystem(), tmp_path)
    system = FakeSystem()
    sweep(system, tmp_path, plan_of(topologies=["1p1d", "2m", "2p1d"]))
    assert system.names == ["2p1d/a", "2p1d/b"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"serve": {"max-model-len": 9}}, "1p1d/a was measured with other settings"),
        ({"topologies": ["2m"]}, "1p1d/a is not in this plan"),
    ],
)
def test_another_sweep_in_the_folder_is_refused_unless_fresh(
    tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    sweep(FakeSystem(), tmp_path)
    with pytest.raises(BenchError, match=says):
        sweep(FakeSystem(), tmp_path, plan_of(**changes))
    system = FakeSystem()
    sweep(system, tmp_path, plan_of(**changes), fresh=True)
    assert len(system.runs) == 2 * len(plan_of(**changes).targets)
    results = {str(p.relative_to(tmp_path).with_suffix("")) for p in tmp_path.glob("*/*.json")}
    assert results == set(system.names)


@pytest.mark.parametrize("key", ["../other", "1m/../../other", "{outside}"])
def test_fresh_removes_nothing_outside_the_folder(tmp_path: Path, key: str) -> None:
    folder, outside = tmp_path / "sweep", tmp_path / "other.json"
    outside.touch()
    sweep(FakeSystem(), folder)
    before = (folder / "sweep.json").read_text()
    named = key.format(outside=outside.with_suffix(""))
    (folder / "sweep.json").write_text(before.replace('"2m/b": {', f'"{named}": {{'))
    with pytest.raises(BenchError, match=r"result is .*other.json, outside its folder: choose"):
        sweep(FakeSystem(), folder, fresh=True)
    assert outside.exists() and (folder / "1p1d" / "a.json").exists()


def test_a_broken_sweep_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "sweep.json"
    says = r"sweep.json is (no sweep's|of 'b/2', .*/1'): choose another --output,"
    for text in ("[]", "{}", '{"points": 3}', '{"schema": "b/2", "points": {}}'):
        file.write_text(text)
        with pytest.raises(BenchError, match=says):
            sweep(FakeSystem(), tmp_path)
    for text in ("{", "[" * 99_999):
        file.write_text(text)
        with pytest.raises(BenchError, match=r"cannot be read \((Expecting prop|maximum recursio)"):
            sweep(FakeSystem(), tmp_path)
    file.unlink()
    file.mkdir()
    with pytest.raises(BenchError, match=r"sweep.json cannot be read \(Is a directory\): choose"):
        sweep(FakeSystem(), tmp_path)


def test_goodput_is_searched_on_a_server_of_known_capacity(tmp_path: Path) -> None:
    system = FakeSystem()
    draw = random.Random(5)
    seeds: list[int] = []

    def answer(run: LoadRun) -> Mapping[str, Any] | None:
        if run.log.stem != "goodput":
            return None
        assert run.options["slo"] == "ttft=1s"
        seeds.append(run.options["seed"])
        share = 0.99 if run.options["request-rate"] <= 5.0 else 0.5
        count = run.options["num-requests"]
        met = [draw.random() < share for _ in range(count)]
        due_s = [index / run.options["request-rate"] for index in range(count)]
        return serve_result(run.label, met=met, due_s=due_s, in_window=[True] * count)

    system.on_run = answer
    plan = plan_of(topologies=["1m"], goodput={"slo": "ttft=1s", "load": "a"})
    assert sweep(system, tmp_path, plan) == 0
    found = json.loads((tmp_path / "1m" / "goodput.json").read_text())
    assert found["kind"] == "goodput"
    low, high = found["interval"]
    assert low <= 5.0 <= high <= 1.1 * low
    assert found["rate"] == low
    assert found["confidence"] == 0.95
    assert found["topology"]["name"] == "1m"
    rates = [point["rate"] for point in found["points"]]
    assert rates == sorted(rates)
    assert {point["meets"] for point in found["points"]} == {True, False}
    assert len(set(seeds)) == len(seeds)  # no probe finds another's prompts in the cache
    # Probes are not results of the sweep: plots must not find them.
    assert {p.name for p in (tmp_path / "1m").glob("*.json")} == {
        "a.json",
        "b.json",
        "goodput.json",
    }


@pytest.mark.parametrize("dies", [False, True])
def test_a_rate_at_which_nobody_is_answered_is_too_high(
    tmp_path: Path, dies: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    system = FakeSystem()

    def answer(run: LoadRun) -> Mapping[str, Any] | None:
        if run.log.stem != "goodput":
            return None
        answered = run.options["request-rate"] <= 5.0
        count = run.options["num-requests"]
        due_s = [index / run.options["request-rate"] for index in range(count)]
        window = {"met": [answered] * count, "due_s": due_s, "in_window": [True] * count}
        result = serve_result(run.label, **window)
        if answered:
            return result
        system.deployed[-1].reason = "out of memory" if dies else None
        raise NothingAnsweredError("no request was answered", result)

    system.on_run = answer
    plan = plan_of(topologies=["1m"], goodput={"slo": "ttft=1s", "load": "a"})
    state = SweepState(plan, tmp_path)
    failed = Sweep(plan, state, system.deploy, system.measure, print).run()
    if dies:
        assert (failed, reasons(tmp_path)["1m/goodput"]) == (1, "out of memory")
        assert "found before it failed: 4 req/s and perhaps more" in capsys.readouterr().out
        [search] = load([Source(tmp_path / "1m" / "goodput.json")]).searches
        assert (search.finished, search.rate, search.interval) == (False, 4.0, (4.0, math.inf))
        assert [point.rate for point in search.points] == [1.0, 2.0, 4.0]
        assert not SweepState(plan, tmp_path).is_done(plan.all_points()[-1]), "it is tried again"
        return
    assert failed == 0
    low, high = json.loads((tmp_path / "1m" / "goodput.json").read_text())["interval"]
    assert low <= 5.0 <= high <= 1.1 * low


@pytest.mark.parametrize(("limit", "interval"), [(0.08, (0.074, 0.081)), (0.01, (0.0, 0.0625))])
def test_a_search_makes_no_run_that_is_longer_than_the_timeout(
    tmp_path: Path, limit: float, interval: tuple[float, float], capsys: pytest.CaptureFixture[str]
) -> None:
    system = FakeSystem()

    def answer(run: LoadRun) -> Mapping[str, Any]:
        count = run.options["num-requests"]
        if count / run.options["request-rate"] > run.timeout_s:
            raise RunFailedError("took longer than 3600 s (timeout_s)")
        met = [run.options["request-rate"] <= limit] * count
        return serve_result(run.label, met=met, due_s=[0.0] * count, in_window=[True] * count)

    system.on_run = answer
    plan = plan_of(topologies=["1m"], loads=[], goodput={"slo": "ttft=1s", "arguments": {"x": 1}})
    state = SweepState(plan, tmp_path)
    assert Sweep(plan, state, system.deploy, system.measure, print).run() == 0
    found = json.loads((tmp_path / "1m" / "goodput.json").read_text())["interval"]
    assert found == pytest.approx(interval, rel=0.01)
    assert ("timeout_s is 3600: raise it" in capsys.readouterr().out) == (limit < 0.05)


def test_a_search_without_outcomes_fails_and_says_so(tmp_path: Path) -> None:
    plan = plan_of(topologies=["1m"], goodput={"slo": "ttft=1s", "load": "a"})
    assert sweep(FakeSystem(), tmp_path, plan) == 1
    assert "which requests met the SLO" in str(reasons(tmp_path)["1m/goodput"])
