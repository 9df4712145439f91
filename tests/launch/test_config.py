"""The settings: what is refused, what is filled in, what is passed on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tasuki.errors import TasukiError
from tasuki.launch.config import ServeConfig, Topology
from tasuki.launch.errors import LaunchError, TopologyError
from tasuki.launch.role_options import parse_role_options
from tasuki.launch.router_options import RouterOptions
from tasuki.options import arguments
from tasuki.worker.config import WorkerConfig


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ((None, None, None), (1, 1, 0)),
        ((2, None, None), (2, 1, 0)),
        ((None, 3, None), (1, 3, 0)),
        ((None, None, 2), (0, 0, 2)),
        ((1, None, 1), (1, 0, 1)),
        ((2, 0, None), (2, 0, 0)),
        ((None, None, 0), (1, 1, 0)),
    ],
)
def test_what_is_not_said_is_filled_in(
    said: tuple[int | None, int | None, int | None], expected: tuple[int, int, int]
) -> None:
    topology = Topology.of(*said)
    assert (topology.prefill, topology.decode, topology.mixed) == expected


def test_members_are_numbered_within_their_role() -> None:
    names = list(Topology(prefill=2, decode=1, mixed=1).members())
    assert names == [
        ("prefill-0", "prefill"),
        ("prefill-1", "prefill"),
        ("decode-0", "decode"),
        ("mixed-0", "mixed"),
    ]


@pytest.mark.parametrize("counts", [(0, 0, 0), (-1, 2, 0), (40, 40, 0)])
def test_impossible_topologies_are_refused_with_the_value(counts: tuple[int, int, int]) -> None:
    with pytest.raises(TopologyError) as refused:
        Topology(*counts)
    assert str(sum(counts)) in str(refused.value) or "-1" in str(refused.value)


@pytest.mark.parametrize(
    ("topology", "says"),
    [
        (Topology(1, 0), r"\(1 prefill\) has no decode worker: give --decode or --mixed"),
        (Topology(0, 2), r"\(2 decode\) has no prefill worker: give --prefill or --mixed"),
    ],
)
def test_strict_roles_require_workers_for_both_halves(topology: Topology, says: str) -> None:
    strict = RouterOptions(strict_roles=True)
    with pytest.raises(TopologyError, match=says):
        ServeConfig(model="m", topology=topology, router=strict)
    follows = replace(strict, roles="follow")  # the router may give a worker the other role
    assert ServeConfig(model="m", topology=topology, router=follows)
    assert ServeConfig(model="m", topology=topology)
    assert ServeConfig(model="m", topology=replace(topology, mixed=1), router=strict)


@pytest.mark.parametrize("ranks", [0, 65])
def test_ranks_out_of_range_are_refused_by_name(ranks: int) -> None:
    with pytest.raises(TopologyError, match=f"--tp-decode is {ranks}: use a value from 1 to 64"):
        ServeConfig(model="m", tensor_parallel=(("prefill", 1), ("decode", ranks)))


def test_each_worker_has_its_roles_ranks() -> None:
    config = ServeConfig(
        model="m", topology=Topology(2, 1, 1), tensor_parallel=(("prefill", 2), ("decode", 4))
    )
    assert config.ranks == (2, 2, 4, 1)


def test_only_what_was_said_is_passed_on() -> None:
    assert arguments(WorkerConfig()) == []
    said = WorkerConfig(kv_memory=10**9, lease_s=2.0, trust_remote_code=True)
    assert arguments(said) == [
        "--kv-memory",
        "1000000000",
        "--lease-s",
        "2",
        "--trust-remote-code",
    ]
    always = ["--readiness-grace-s", "0", "--drain-s"]
    assert RouterOptions(strict_roles=True).arguments() == ["--strict-roles", *always, "30"]
    traced = RouterOptions(otlp_endpoint="http://a:4318", trace_sample_ratio=0.25)
    sent = ["--otlp-endpoint", "http://a:4318", "--trace-sample-ratio", "0.25"]
    assert traced.arguments() == [*sent, *always, "30"]
    by_turns = RouterOptions(policy="round-robin")
    assert by_turns.arguments() == ["--policy", "round-robin", *always, "30"]
    assert RouterOptions(client_stall_s=1.5, max_connections=8, drain_s=0).arguments() == [
        "--max-connections",
        "8",
        "--client-stall-s",
        "1.5",
        *always,
        "0",
    ]


def test_options_of_a_role_win_for_its_workers() -> None:
    config = ServeConfig(
        model="m",
        worker=WorkerConfig(max_batched_tokens=512, lease_s=2.0),
        role_options={"prefill": parse_role_options("prefill", ["max-batched-tokens=4096"])},
    )
    assert config.worker_of("prefill") == WorkerConfig(
        max_batched_tokens=4096, lease_s=2.0, drain_s=30.0
    )
    assert config.worker_of("decode") == replace(config.worker, drain_s=30.0)


def test_steps_are_shorter_than_a_token_may_take() -> None:
    config = ServeConfig(model="m", router=RouterOptions(tpot_target_ms=25.0))
    assert config.worker_of("decode").itl_target_ms == 20.0
    said = replace(config, worker=WorkerConfig(itl_target_ms=9.0))
    assert said.worker_of("decode").itl_target_ms == 9.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max-batched-tokens", "write NAME=VALUE with one of gpu-memory-utilization, block-size, "),
        ("kv-dtype=fp8", "write NAME=VALUE with one of "),
        ("max-batched-tokens=many", "'many' is not a whole number"),
        ("itl-target-ms=x", "'x' is not a number"),
    ],
)
def test_a_bad_option_of_a_role_is_named(text: str, message: str) -> None:
    with pytest.raises(LaunchError, match=f"--decode-option {text}: {message}"):
        parse_role_options("decode", [text])
    with pytest.raises(LaunchError, match="max-batched-tokens is given twice"):
        parse_role_options("decode", ["max-batched-tokens=64", "max-batched-tokens=32"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"worker": {"dtype": "float16"}}, "dtype is 'float16'"),
        ({"worker": {"block_size": 0}}, "block-size is 0"),
        ({"router": {"on_kv_loss": "panic"}}, "--on-kv-loss is 'panic'"),
        (
            {"role_options": {"mixed": {"max_batched_tokens": 64}}},
            "--mixed-option is given, and there is no mixed worker",
        ),
        ({"role_options": {"decode": {"max_batched_tokens": 0}}}, "max-batched-tokens is 0"),
        ({"router": {"policy": "random"}}, "--policy is 'random'"),
        ({"router": {"roles": "foo"}}, "--roles is 'foo': use one of fixed, follow"),
        ({"on": "ray", "hosts": (("decode", 2),)}, "--hosts-decode is 2, --tp-decode is 1"),
        ({"on": "ray", "hosts": (("mixed", 0),)}, "--hosts-mixed is 0"),
        (
            {"hosts": (("decode", 2),), "tensor_parallel": (("decode", 2),)},
            r"--spread, --hosts-\* and --worker-cpus divide a Ray cluster: give --on ray too",
        ),
        (
            {
                "on": "ray",
                "hosts": (("decode", 2),),
                "tensor_parallel": (("decode", 2),),
                "worker": {"all_reduce": "symmetric"},
            },
            "--hosts-decode is 2, --all-reduce is symmetric",
        ),
        ({"router": {"otlp_endpoint": "https://a:4318"}}, "use http://HOST:PORT"),
        ({"router": {"trace_sample_ratio": 0.5}}, "without --otlp-endpoint"),
        ({"port": 70_000}, "--port is 70000"),
        (
            {"worker_base_port": 65_535},
            "--worker-base-port is 65535, 2 workers count up from it: use a value from 1 to 65534,"
            " or 0 for free ports",
        ),
        ({"worker_base_port": -1}, "--worker-base-port is -1, "),
    ],
)
def test_bad_settings_are_refused_before_anything_starts(
    settings: dict[str, Any], message: str
) -> None:
    made = {"worker": WorkerConfig, "router": RouterOptions}
    with pytest.raises(TasukiError, match=message):
        ServeConfig(
            model="m",
            **{name: made[name](**v) if name in made else v for name, v in settings.items()},
        )


@pytest.mark.parametrize(("names", "said"), [(("a", "b", "a"), "'a', 'b', 'a'"), (("",), "''")])
def test_a_name_of_the_model_is_given_once_and_not_empty(names: tuple[str, ...], said: str) -> None:
    with pytest.raises(LaunchError, match=f"--served-model-name is {said}: give each name once"):
        ServeConfig(model="m", served_names=names)
    assert ServeConfig(model="m", served_names=("a", "b")).served_names == ("a", "b")


def test_workers_are_spread_together_or_by_role() -> None:
    assert Topology().spread_of("decode") == ("all", "pack")
    topology = Topology(1, 2).spread_as(["spread", "decode=strict-spread"])
    assert topology.spread_of("prefill") == ("all", "spread")
    assert topology.spread_of("decode") == ("decode", "strict-spread")
    assert Topology(1, 2).spread_as(["decode=spread"]).spread_of("prefill") == ("all", "pack")
    for bad in ("near", "both=pack", "decode="):
        with pytest.raises(TopologyError, match="use one of pack, spread, strict-spread"):
            Topology().spread_as([bad])
    with pytest.raises(TopologyError, match="twice"):
        Topology().spread_as(["decode=pack", "decode=spread"])


def test_another_number_of_workers() -> None:
    assert Topology(1, 1).with_count("decode", 3) == Topology(1, 3)
    for role, count, says in (
        ("decode", 0, "use 1 or more"),
        ("both", 1, "is no role"),
        ("decode", 64, "use 1 to 64"),
    ):
        with pytest.raises(TopologyError, match=says):
            Topology(1, 1).with_count(role, count)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"on": "slurm"}, "use local, ray or ray://HOST:PORT"),
        ({"on": "ray://head"}, "use ray, or ray://HOST:PORT"),
        ({"on": "ray", "worker_host": "0.0.0.0"}, "leave it out"),
        ({"worker_cpus": 2}, "give --on ray"),
        ({"topology": Topology().spread_as(["spread"])}, "give --on ray"),
        ({"topology": Topology().spread_as(["pack"])}, "give --on ray"),
    ],
)
def test_places_that_do_not_fit_are_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(LaunchError, match=says):
        ServeConfig(model="m", **settings)
    assert ServeConfig(model="m", on="ray://10.0.0.1:6379", worker_cpus=2).on
    assert ServeConfig(model="m", on="ray://[::1]:6379").on
