"""Topologies that are measured in several ways."""

from __future__ import annotations

import pytest

from tasuki.bench.errors import BenchError
from tasuki.bench.kinds import each_way
from tasuki.bench.topologies import Target
from tasuki.launch.config import Topology

SPLIT = Target("1p1d", Topology(1, 1), (("on", "ray"),))


def test_every_combination_is_a_target_with_a_name_of_its_own() -> None:
    kinds = {"transport": ["tcp", "host-staged"], "spread": ["pack", "strict-spread"]}
    targets = each_way([SPLIT, Target("2m", Topology(0, 0, 2))], kinds)
    assert [target.name for target in targets] == [
        f"{name}-{transport}-{spread}"
        for name in ("1p1d", "2m")
        for transport in ("tcp", "host-staged")
        for spread in ("pack", "strict-spread")
    ]
    first, third = targets[0], targets[2]
    assert dict(first.environment)["UCX_TLS"].startswith("tcp,")
    assert dict(first.serve) == {"on": "ray", "spread": "pack"}
    assert (third.environment, third.serve[1:]) == (
        (),
        (("transport", "host-staged"), ("spread", "pack")),
    )
    block = first.describe(machine_gpus=8)
    assert (block["transport"], block["spread"], block["gpus"]) == ("tcp", "pack", 2)


def test_without_kinds_nothing_changes() -> None:
    assert each_way([SPLIT], {}) == [SPLIT]


def test_kinds_that_are_empty_or_said_twice_are_refused() -> None:
    with pytest.raises(BenchError, match="transport is empty"):
        each_way([SPLIT], {"transport": []})
    twice = Target("1p1d", Topology(1, 1), (("spread", "pack"),))
    with pytest.raises(BenchError, match="spread is in serve and beside it"):
        each_way([twice], {"spread": ["pack"]})
