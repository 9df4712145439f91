"""What a deployment asks of a cluster, and how it is told that there is no room."""

from __future__ import annotations

from tasuki.launch.config import ServeConfig, Topology
from tasuki.launch.placement import (
    DIVIDED,
    Bundle,
    Group,
    Node,
    at_address,
    divided,
    is_too_much,
    make_groups,
    no_room,
    passed_on,
)


def groups(config: ServeConfig, *, on_gpus: bool = False) -> list[Group]:
    return make_groups(config, config.topology.members(), on_gpus)


def test_all_workers_are_one_group_unless_a_role_is_apart() -> None:
    (one,) = groups(ServeConfig(model="m", on="ray", topology=Topology(1, 2)))
    assert one.spread == "pack"
    assert [bundle.name for bundle in one.bundles] == ["prefill-0", "decode-0", "decode-1"]
    apart = Topology(1, 2).spread_as(["spread", "decode=strict-spread"])
    first, second = groups(ServeConfig(model="m", on="ray", topology=apart))
    assert (first.spread, [b.name for b in first.bundles]) == ("spread", ["prefill-0"])
    assert (second.spread, len(second.bundles)) == ("strict-spread", 2)


def test_a_bundle_has_a_gpu_and_a_cpu_for_each_rank() -> None:
    ranks = (("prefill", 2), ("decode", 1))
    config = ServeConfig(model="m", on="ray", tensor_parallel=ranks)
    (group,) = groups(config, on_gpus=True)
    assert [b.resources() for b in group.bundles] == [{"CPU": 2, "GPU": 2}, {"CPU": 1, "GPU": 1}]
    (group,) = groups(config)
    assert [b.resources() for b in group.bundles] == [{"CPU": 2}, {"CPU": 1}]
    many = ServeConfig(model="m", on="ray", worker_cpus=8, tensor_parallel=ranks)
    assert [b.cpus for b in groups(many)[0].bundles] == [8, 8]


def test_the_hosts_of_a_worker_are_a_group_of_their_own() -> None:
    divided_prefill = {"tensor_parallel": (("prefill", 4),), "hosts": (("prefill", 2),)}
    config = ServeConfig(model="m", on="ray", topology=Topology(2, 1), **divided_prefill)
    first, second, rest = groups(config, on_gpus=True)
    half = Bundle("prefill-0", 2, 2)
    assert first == Group(DIVIDED, (half, half))
    assert [bundle.name for bundle in second.bundles] == ["prefill-1", "prefill-1"]
    assert rest == Group("pack", (Bundle("decode-0", 1, 1),))

    apart = Topology(1, 1).spread_as(["strict-spread"])  # so are its hosts, then
    (all_workers,) = groups(ServeConfig(model="m", on="ray", topology=apart, **divided_prefill))
    names = [bundle.name for bundle in all_workers.bundles]
    assert (all_workers.spread, names) == ("strict-spread", ["prefill-0", "prefill-0", "decode-0"])


def test_divided_workers_need_nodes_that_have_places_together() -> None:
    half = Bundle("prefill-0", 1, 0)
    asked = [Group(DIVIDED, (half, half)), Group(DIVIDED, (half, half))]
    assert not is_too_much(asked, [Node("a", 2, 0), Node("b", 2, 0)])
    assert is_too_much(asked[:1], [Node("a", 9, 0)])
    assert is_too_much(asked, [Node("a", 9, 0), Node("b", 1, 0)]), "each alone has room"
    assert not is_too_much(asked, [Node("a", 2, 0), Node("b", 1, 0), Node("c", 1, 0)])
    text = no_room(asked[:1], [Node("a", 9, 0)], beside=3)
    assert "no room for prefill-0 on 2 nodes (1 CPU each), beside 3 other workers; its" in text


def test_a_host_of_a_worker_knows_all_of_them_and_its_number() -> None:
    words = ["worker", "--host", "10.0.0.2", "--port", "0"]
    nodes = ("10.0.0.1:4711", "10.0.0.2")
    assert divided(words, nodes, 1)[5:] == ["--nodes", "10.0.0.1:4711,10.0.0.2", "--rank", "1"]
    assert divided(words, (), 0) == words


def test_no_room_says_what_is_asked_and_what_there_is() -> None:
    asked = [
        Group("strict-spread", (Bundle("prefill-0", 2, 2), Bundle("prefill-1", 2, 2))),
        Group("pack", (Bundle("decode-0", 1, 0),)),
    ]
    text = no_room(asked, [Node("10.0.0.1", 8, 1), Node("10.0.0.2", 4, 0)])
    assert "prefill-0, prefill-1 (2 CPU and 2 GPU each), each on a node of its own; " in text
    assert "decode-0 (1 CPU each); its nodes have" in text
    assert "10.0.0.1: 8 CPU and 1 GPU, 10.0.0.2: 4 CPU: add nodes" in text
    assert "its nodes have no node" in no_room(asked, [])


def test_too_much_is_more_than_the_whole_cluster_has() -> None:
    asked = [Group("pack", (Bundle("mixed-0", 2, 1), Bundle("mixed-1", 2, 1)))]
    assert not is_too_much(asked, [Node("a", 2, 2), Node("b", 2, 0)])
    assert is_too_much(asked, [Node("a", 3, 2)])
    assert is_too_much(asked, [Node("a", 4, 1)])


def test_bundles_apart_need_a_node_each() -> None:
    small, large = Bundle("mixed-0", 1, 0), Bundle("mixed-1", 4, 1)
    apart = [Group("strict-spread", (small, large))]
    assert not is_too_much(apart, [Node("a", 1, 0), Node("b", 4, 1)])
    assert is_too_much(apart, [Node("a", 9, 9)])
    assert is_too_much(apart, [Node("a", 8, 0), Node("b", 8, 0), Node("c", 0, 1)])
    assert is_too_much(apart, [Node("a", 0, 0), Node("b", 4, 1)])
    assert not is_too_much([Group("spread", (small, large))], [Node("a", 9, 9)])


def test_a_worker_binds_the_address_that_its_node_has() -> None:
    words = ["worker", "--host", "127.0.0.1", "--port", "0", "--role", "mixed"]
    moved = at_address(words, "10.0.0.1", 7)
    assert moved == ["worker", "--host", "10.0.0.1", "--port", "7", "--role", "mixed"]
    assert words[2] == "127.0.0.1"


def test_only_libraries_variables_go_to_other_nodes() -> None:
    own = {"UCX_TLS": "tcp", "HF_TOKEN": "t", "HOME": "/root", "TASUKI_CACHE": "/c", "PATH": "/"}
    assert passed_on(own) == {"UCX_TLS": "tcp", "HF_TOKEN": "t"}
