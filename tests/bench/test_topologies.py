"""Names of topologies, every split of N workers, and the block of the result file."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasuki.bench.errors import BenchError
from tasuki.bench.topologies import Target, every_split, parse_topology, topology_name
from tasuki.launch.config import Topology


@pytest.mark.parametrize(
    ("name", "topology"),
    [
        ("1p1d", Topology(1, 1, 0)),
        ("2p13d", Topology(2, 13, 0)),
        ("4m", Topology(0, 0, 4)),
        ("1p1d1m", Topology(1, 1, 1)),
        ("1p1m", Topology(1, 0, 1)),
    ],
)
def test_a_name_is_its_workers_and_back(name: str, topology: Topology) -> None:
    assert parse_topology(name) == topology
    assert topology_name(topology) == name


@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9))
def test_every_topology_that_can_serve_has_a_name(prefill: int, decode: int, mixed: int) -> None:
    if (prefill and decode) or mixed:
        topology = Topology(prefill, decode, mixed)
        assert parse_topology(topology_name(topology)) == topology


@pytest.mark.parametrize("name", ["", "1d1p", "2x", "p1d1", "1p 1d", "-1p1d"])
def test_what_is_no_name_is_refused_with_an_example(name: str) -> None:
    with pytest.raises(BenchError, match="1p1d"):
        parse_topology(name)


def test_half_a_split_is_refused() -> None:
    with pytest.raises(BenchError, match="2 prefill, 0 decode"):
        parse_topology("2p")


def test_every_split_of_four_workers() -> None:
    assert [topology_name(t) for t in every_split(4)] == ["4m", "1p3d", "2p2d", "3p1d"]
    assert [topology_name(t) for t in every_split(1)] == ["1m"]
    with pytest.raises(BenchError, match="workers is 0"):
        every_split(0)


def test_the_block_of_the_result_file_counts_all_ranks() -> None:
    target = Target("tp", Topology(1, 2, 0), (("tp-prefill", 2),))
    block = target.describe(machine_gpus=8)
    assert block["name"] == "tp"
    assert (block["prefill"], block["decode"], block["mixed"], block["workers"]) == (1, 2, 0, 3)
    assert block["tensor_parallel"] == {"prefill": 2, "decode": 1, "mixed": 1}
    assert block["gpus"] == 4
    assert "hosts" not in block
    divided = Target("hosts", Topology(1, 2, 0), (("tp-prefill", 2), ("hosts-prefill", 2)))
    assert divided.describe(8)["hosts"] == {"prefill": 2, "decode": 1, "mixed": 1}
    assert target.describe(machine_gpus=2)["gpus"] == 2, "workers may share them"
    assert target.describe(machine_gpus=0)["gpus"] == 0
    assert Target("cpu", Topology(1, 1, 0), (("device", "cpu"),)).describe(8)["gpus"] == 0


@pytest.mark.parametrize(
    ("name", "options", "strict"),
    [
        ("1p1d", {}, True),
        ("1p1d", {"strict-roles": False}, False),
        ("2m", {}, None),
    ],
)
def test_a_row_called_a_split_is_one(
    name: str, options: dict[str, bool], strict: bool | None
) -> None:
    target = Target(name, parse_topology(name), tuple(options.items()))
    assert target.options.get("strict-roles") is strict
