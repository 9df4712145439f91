"""Topologies measured in several ways: each by every transport, each with every spread. Pure."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from tasuki.bench.errors import BenchError
from tasuki.bench.topologies import Target

# Kinds of transport that UCX chooses among, and what leaves it one of them (UCX_TLS): beside
# it what GPU memory is copied by, and for CUDA IPC, which reaches one machine only, TCP for the
# messages that set it up. `tcp` is UCX's here, not `--transport tcp`.
# Source: UCX's FAQ, "Which transports does UCX use?".
UCX_TRANSPORTS = {
    "cuda_ipc": "cuda_ipc,cuda_copy,tcp,self",
    "rdma": "rc,cuda_copy,gdr_copy,self",
    "tcp": "tcp,cuda_copy,self",
}
_UCX_VARIABLE = "UCX_TLS"


def each_way(targets: Sequence[Target], kinds: Mapping[str, Sequence[str]]) -> list[Target]:
    """Every target in every combination of kinds.

    Args:
        targets: By topology.
        kinds: Values of `transport` (of `UCX_TRANSPORTS`, or as `tasuki serve --transport` takes
            them) and of `spread` (as `--spread` takes them).

    Raises:
        BenchError: One has no value, or is among the options of `serve`, too.
    """
    for kind, values in kinds.items():
        if not values:
            raise BenchError(f"{kind} is empty: name at least one, or leave it out")
        if any(kind in target.options for target in targets):
            raise BenchError(f"{kind} is in serve and beside it: keep one")
    ways = [tuple(zip(kinds, values, strict=True)) for values in itertools.product(*kinds.values())]
    return [_one_way(target, way) for target in targets for way in ways]


def _one_way(target: Target, way: tuple[tuple[str, str], ...]) -> Target:
    serve, environment = dict(target.serve), dict(target.environment)
    for kind, value in way:
        if kind == "transport" and value in UCX_TRANSPORTS:
            environment[_UCX_VARIABLE] = UCX_TRANSPORTS[value]
        else:
            serve[kind] = value
    name = "-".join([target.name, *(value for _, value in way)])
    return replace(
        target,
        name=re.sub(r"[^A-Za-z0-9._-]+", "_", name),
        serve=tuple(serve.items()),
        environment=tuple(environment.items()),
        kinds=way,
    )
