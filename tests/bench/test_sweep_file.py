"""What a sweep's YAML becomes, and what is said of a wrong one."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.processes import REPOSITORY

from tasuki.bench.errors import BenchError
from tasuki.bench.plan import PROBE_SEED, WARMUP_SEED, Plan, load_seed
from tasuki.bench.sweep_file import read_sweep

WHOLE = """
model: smollm2-135m
serve: {max_model_len: 2048, kv-memory: 500MB}
topologies:
  - 1p1d
  - 2m
  - {topology: 1p1d, name: small-chunks, serve: {max-batched-tokens: 128}}
loads:
  - name: chat
    arguments: {input-tokens: 512, ignore-eos: true}
    each: {request-rate: [0.5, 2], range-ratio: [1]}
  - name: long
    arguments: {input-tokens: 1500, workload: random}
goodput: {load: long, slo: "ttft=2s,tpot=50ms", attainment: 0.95, max_probes: 6}
warmup_requests: 2
"""


def read(tmp_path: Path, text: str, **flags: object) -> Plan:
    file = tmp_path / "sweep.yaml"
    file.write_text(text)
    return read_sweep(file, flags)


def test_a_whole_file(tmp_path: Path) -> None:
    plan = read(tmp_path, WHOLE)
    assert [t.name for t in plan.targets] == ["1p1d", "2m", "small-chunks"]
    assert plan.serve_options(plan.targets[2]) == {
        "model": "smollm2-135m",
        "max-model-len": 2048,
        "kv-memory": "500MB",
        "max-batched-tokens": 128,
        "strict-roles": True,
    }
    assert [load.name for load in plan.loads] == [
        "chat-request-rate-0.5-range-ratio-1",
        "chat-request-rate-2-range-ratio-1",
        "long",
    ]
    assert plan.loads[1].options == {
        "input-tokens": 512,
        "ignore-eos": True,
        "request-rate": 2,
        "range-ratio": 1,
        "seed": load_seed("chat-request-rate-2-range-ratio-1"),
    }
    assert plan.goal is not None
    assert plan.goal.options == {"input-tokens": 1500, "workload": "random"}
    assert (plan.goal.search.attainment, plan.goal.search.max_probes) == (0.95, 6)
    assert [p.key for p in plan.all_points()][:4] == [
        "1p1d/chat-request-rate-0.5-range-ratio-1",
        "1p1d/chat-request-rate-2-range-ratio-1",
        "1p1d/long",
        "1p1d/goodput",
    ]
    assert plan.warmup_requests == 2


def test_workers_mean_colocated_and_every_ratio(tmp_path: Path) -> None:
    plan = read(tmp_path, "workers: 3\nloads: [{name: a}]")
    assert [t.name for t in plan.targets] == ["3m", "1p2d", "2p1d"]


def test_flags_alone_and_flags_over_a_file(tmp_path: Path) -> None:
    plan = read_sweep(None, {"workers": 2, "loads": [{"name": "load", "arguments": {"rate": 1}}]})
    assert [t.name for t in plan.targets] == ["2m", "1p1d"]
    plan = read(tmp_path, WHOLE, workers=1, model="other")
    assert [t.name for t in plan.targets] == ["1m"]
    assert plan.model == "other"
    assert len(plan.loads) == 3


def test_the_search_says_rates_and_requests_itself(tmp_path: Path) -> None:
    text = """
topologies: [1m]
goodput:
  slo: ttft=1s
  arguments: {request-rate: 3, num-requests: 5, duration-s: 9, input-tokens: 9}
"""
    plan = read(tmp_path, text)
    assert plan.goal is not None
    assert plan.goal.options == {"input-tokens": 9}
    assert not plan.loads


def test_a_fingerprint_changes_with_what_is_measured_and_only_then(tmp_path: Path) -> None:
    def of(text: str, key: str = "1p1d/long") -> str:
        plan = read(tmp_path, text)
        return next(plan.fingerprint(p) for p in plan.all_points() if p.key == key)

    same = of(WHOLE)
    assert of(WHOLE.replace("[0.5, 2]", "[0.5, 1, 2]")) == same
    assert of(WHOLE.replace("2m", "3m")) == same
    assert of(WHOLE.replace("1500", "1501")) != same
    assert of(WHOLE.replace("500MB", "600MB")) != same
    assert of(WHOLE.replace("  - 1p1d\n", "  - {topology: 2p1d, name: 1p1d}\n")) != same
    searched = of(WHOLE, "1p1d/goodput")
    assert of(WHOLE.replace("0.95", "0.9"), "1p1d/goodput") != searched


def test_plain_words_are_read_as_yaml_1_2(tmp_path: Path) -> None:
    words = "a: 5000:250, b: on, c: 1e3, d: -2, e: .5, f: true, g: 2026-01-01, h: 010, i: 12.50"
    plan = read(tmp_path, f"workers: 1\nloads: [{{name: x, arguments: {{{words}, j: }}}}]")
    said = dict(plan.loads[0].options)
    del said["seed"]
    assert said == {
        "a": "5000:250",
        "b": "on",
        "c": 1000.0,
        "d": -2,
        "e": 0.5,
        "f": True,
        "g": "2026-01-01",
        "h": 10,
        "i": 12.5,
        "j": None,
    }


def test_a_search_may_have_the_arguments_of_a_load_that_has_none(tmp_path: Path) -> None:
    plan = read(tmp_path, "workers: 1\ngoodput: {slo: ttft=1s, arguments: {}}")
    assert plan.goal is not None and plan.goal.options == {}


def test_every_load_has_prompts_of_its_own_unless_told(tmp_path: Path) -> None:
    text = "workers: 1\nloads: [{name: a}, {name: b, arguments: {seed: 7}}, {name: c}]"
    seeds = [load.options["seed"] for load in read(tmp_path, text).loads]
    assert seeds == [load_seed("a"), 7, load_seed("c")]
    assert len({*seeds, WARMUP_SEED, PROBE_SEED}) == 5
    assert max(seeds) < WARMUP_SEED < PROBE_SEED


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is empty: write settings"),
        ("a: [1", "is no YAML"),
        pytest.param("[" * 9999, "is no YAML: maximum recursion depth exceeded", id="deep"),
        ("workers: 65\nloads: [{name: a}]", "the topology has 65 workers: use 1 to 64"),
        ("topologies: [1p1d]", "nothing to run"),
        ("loads: [{name: a}]", "either topologies"),
        ("workers: 2\ntopologies: [1p1d]\nloads: [{name: a}]", "either topologies"),
        ("topologies: []\nloads: [{name: a}]", "at least one"),
        ("topologies: [2q]\nloads: [{name: a}]", "'2q': write workers by role"),
        ("workers: 0\nloads: [{name: a}]", "workers is 0: use 1 or more"),
        ("workers: two\nloads: [{name: a}]", "workers is 'two'"),
        ("workers: true\nloads: [{name: a}]", "workers is True: it is no switch: write a number"),
        (
            "workers: 2\nloads: [{name: a}]\ngoodput: {slo: ttft=1s, max_probes: true}",
            "goodput.max_probes is True: it is no switch",
        ),
        ("workers: 2\nwarmup_requests: false\nloads: [{name: a}]", "warmup_requests is False: it"),
        (
            "workers: 2\nserve: {max-model-len: true}\nloads: [{name: a}]",
            "serve: max-model-len is true, and it is no flag: give its value",
        ),
        ("workers: 2\nload: []", "load is no setting: there is model, serve, workers"),
        ("workers: 2\nloads: [{nam: a}]", "loads.0"),
        ("workers: 2\nloads: [{}]", "loads.0.name is missing"),
        ("workers: 2\nloads: [{name: a/b}]", "loads.0.name is 'a/b'"),
        ("workers: 2\nloads: [{name: a}, {name: a}]", "2 load entries are called 'a'"),
        ("workers: 2\nloads: [{name: goodput}]", "rename it"),
        ("topologies: [1m, 1m]\nloads: [{name: a}]", "2 topology entries"),
        ("topologies: [{topology: 1m, name: a b}]", r"topologies.0.name is 'a b'"),
        ("topologies: [{topology: 1m, serv: {}}]", "topologies.0.serv is no setting: there is"),
        ("topologies: [7]", "topologies.0 is 7"),
        ("workers: 2\nloads: [{name: a, each: {rate: []}}]", "each rate has no values"),
        (
            "workers: 2\nloads: [{name: a, arguments: {rate: 1}, each: {rate: [2]}}]",
            "rate is in arguments and in each",
        ),
        ("workers: 2\nloads: [{name: a, arguments: {base-url: x}}]", "base-url is set by"),
        ("workers: 2\nserve: {prefill: 2}\nloads: [{name: a}]", "prefill is set by the sweep"),
        ("workers: 2\nserve: {dry-run: true}\nloads: [{name: a}]", "dry-run is set by the sweep"),
        ("workers: 2\nserve: {'max len': 2}\nloads: [{name: a}]", "is no option's name"),
        ("workers: 2\ngoodput: {slo: ttft=1s}", "load is None: name one of the loads"),
        ("workers: 2\nloads: [{name: a}]\ngoodput: {slo: ttft=1s, load: b}", "load is 'b'"),
        (
            "workers: 2\nloads: [{name: a}]\ngoodput: {slo: x, attainment: 2}",
            "attainment is 2.0: use a value from",
        ),
        ("workers: 2\nloads: [{name: a}]\ntimeout_s: 0", "timeout_s is 0: .*greater than 0"),
        (
            "workers: 2\nloads: [{name: a, arguments: {num-requests: 9000, request-rate: 2}}]",
            "load a takes about 4505 s, but timeout_s is 3600: raise it, or make the load shorter",
        ),
        ("workers: 2\nloads: [{name: goodput}]", "'goodput', which is the search's: rename it"),
        ("workers: 2\nloads: [{name: serve}]", "'serve', which is the server's: rename it"),
        (
            "workers: 2\nloads: [{name: a}]\ngoodput: {slo: x, attainment: 0.999}",
            "goodput: a run at start_rate 1 takes up to 18444 s, but timeout_s is 3600: raise one",
        ),
    ],
)
def test_a_wrong_file_is_refused_by_name_value_and_remedy(
    tmp_path: Path, text: str, says: str
) -> None:
    with pytest.raises(BenchError, match=says) as caught:
        read(tmp_path, text)
    assert str(tmp_path / "sweep.yaml") in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("file", sorted((REPOSITORY / "benchmarks").glob("*.yaml")))
def test_the_sweeps_of_benchmarks_can_be_read(file: Path) -> None:
    assert read_sweep(file, {}).loads


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"none.yaml cannot be read: No such file"):
        read_sweep(tmp_path / "none.yaml", {})


def test_transports_and_spreads_are_dimensions(tmp_path: Path) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text(
        "topologies: [1p1d, {topology: 2p1d, serve: {tp-prefill: 2}}]\n"
        "on: ray://10.0.0.1:6379\n"
        "transport: [cuda_ipc, rdma, tcp]\n"
        "spread: [pack, spread]\n"
        "loads: [{name: chat, arguments: {request-rate: 1}}]\n"
    )
    plan = read_sweep(file, {})
    assert len(plan.targets) == 12
    assert [t.name for t in plan.targets[:2]] == ["1p1d-cuda_ipc-pack", "1p1d-cuda_ipc-spread"]
    assert {t.options["on"] for t in plan.targets} == {"ray://10.0.0.1:6379"}
    assert len({plan.fingerprint(point) for point in plan.all_points()}) == 12
    by_name = {target["name"]: target for target in plan.describe()["topologies"]}
    assert by_name["2p1d-tcp-spread"]["environment"]["UCX_TLS"].startswith("tcp,")
    with pytest.raises(BenchError, match="serve: on is set by the sweep itself"):
        read_sweep(file, {"serve": {"on": "ray"}})
