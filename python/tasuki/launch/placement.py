"""What a deployment asks of a cluster, and how it is told that there is no room: pure.

A *bundle* is what one node gives to a worker: one bundle, or one for each of its hosts. Bundles
that are spread together are a *group*.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tasuki.launch.config import ServeConfig
from tasuki.launch.engine import Member

# How the bundles of one worker lie: a group of its own, unless all workers are apart anyway.
DIVIDED = "divided"
_APART = "STRICT_SPREAD"
STRATEGIES = {"pack": "PACK", "spread": "SPREAD", "strict-spread": _APART, DIVIDED: _APART}


@dataclass(frozen=True, slots=True)
class Bundle:
    """What one worker has to itself on one node.

    Attributes:
        name: The worker's.
        cpus: CPUs, 1 or more.
        gpus: GPUs, one for each rank there; 0 on the CPU.
    """

    name: str
    cpus: int
    gpus: int

    def resources(self) -> dict[str, float]:
        """As Ray names them."""
        named = {"CPU": float(self.cpus), "GPU": float(self.gpus)}
        return {name: amount for name, amount in named.items() if amount}


@dataclass(frozen=True, slots=True)
class Group:
    """Bundles that are spread together.

    Attributes:
        spread: One of `STRATEGIES`.
        bundles: At least one.
    """

    spread: str
    bundles: tuple[Bundle, ...]


@dataclass(frozen=True, slots=True)
class Node:
    """What a node of the cluster has, used or not.

    Attributes:
        address: Its host.
        cpus: CPUs.
        gpus: GPUs.
    """

    address: str
    cpus: float
    gpus: float


def make_groups(config: ServeConfig, members: Iterable[Member], on_gpus: bool) -> list[Group]:
    """The groups of some workers, by role.

    One of all roles, one of each role that is said apart, and one of each worker that is divided
    among nodes.
    """
    groups: dict[tuple[str, str], list[Bundle]] = {}
    for name, role in members:
        hosts = config.hosts_of(role)
        ranks = config.ranks_of(role) // hosts
        bundle = Bundle(name, config.worker_cpus or ranks, ranks if on_gpus else 0)
        group, how = config.topology.spread_of(role)
        if hosts > 1 and STRATEGIES[how] != _APART:
            group, how = name, DIVIDED
        groups.setdefault((group, how), []).extend([bundle] * hosts)
    return [Group(how, tuple(bundles)) for (_, how), bundles in groups.items()]


def without(group: Group, names: Collection[str]) -> Group:
    """The group without the bundles of these workers; it may have none then."""
    return Group(group.spread, tuple(b for b in group.bundles if b.name not in names))


def no_room(groups: Sequence[Group], nodes: Sequence[Node], beside: int = 0) -> str:
    """Why these groups have no place: what is asked, what there is, and what helps.

    Args:
        groups: What is asked.
        nodes: All of the cluster.
        beside: Workers of the deployment that have places.
    """
    asked = "; ".join(_describe(group) for group in groups)
    asked += f", beside {beside} other workers" if beside else ""
    have = ", ".join(f"{n.address}: {_amount(n.cpus, n.gpus)}" for n in nodes) or "no node"
    return (
        f"the Ray cluster has no room for {asked}; its nodes have {have}: add nodes, or ask for"
        " less (--prefill, --decode, --mixed, --tp-*, --hosts-*, --worker-cpus, --spread)"
    )


def is_too_much(groups: Sequence[Group], nodes: Sequence[Node]) -> bool:
    """Whether these groups would have no place if the whole cluster were free.

    Ray says so of a single bundle that fits no node. This adds what Ray waits for in vain: more
    than all nodes have together, and more bundles apart than there are nodes for them.
    """
    bundles = [bundle for group in groups for bundle in group.bundles]
    cpus, gpus = sum(b.cpus for b in bundles), sum(b.gpus for b in bundles)
    if cpus > sum(n.cpus for n in nodes) or gpus > sum(n.gpus for n in nodes):
        return True
    apart = [group.bundles for group in groups if STRATEGIES[group.spread] == _APART]
    return _lack_nodes(apart, nodes) or any(_lack_nodes([each], nodes) for each in apart)


def _lack_nodes(groups: Sequence[Sequence[Bundle]], nodes: Sequence[Node]) -> bool:
    """Whether nodes have too few places for the bundles of some size, and larger ones.

    A node takes one bundle of each group at most.
    """

    def lack(least: Bundle) -> bool:
        wanted = [sum(_is_as_large(each, least) for each in group) for group in groups]
        takers = sum(count > 0 for count in wanted)
        return sum(min(_times(least, node), takers) for node in nodes) < sum(wanted)

    return any(lack(bundle) for group in groups for bundle in group)


def _is_as_large(bundle: Bundle, least: Bundle) -> bool:
    return bundle.cpus >= least.cpus and bundle.gpus >= least.gpus


def _times(bundle: Bundle, node: Node) -> int:
    """How often a node has what a bundle asks."""
    by_cpus = int(node.cpus // bundle.cpus)
    return min(by_cpus, int(node.gpus // bundle.gpus)) if bundle.gpus else by_cpus


def at_address(arguments: Sequence[str], host: str, port: int) -> list[str]:
    """A worker's arguments with the address that it binds."""
    words = list(arguments)
    for flag, value in (("--host", host), ("--port", str(port))):
        words[words.index(flag) + 1] = value
    return words


def divided(arguments: Sequence[str], nodes: Sequence[str], number: int) -> list[str]:
    """The arguments of a worker's host: what all of them have, and which one it is.

    Args:
        arguments: Of the worker.
        nodes: Its hosts, HOST:PORT first; none: it has one, and these are its arguments.
        number: This host's, from 0.
    """
    if not nodes:
        return list(arguments)
    return [*arguments, "--nodes", ",".join(nodes), "--rank", str(number)]


def passed_on(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables of the launcher that its workers on other nodes get, too: of libraries alone."""
    kinds = ("UCX_", "NIXL_", "NCCL_", "GLOO_", "HF_", "OMP_")
    return {name: value for name, value in environment.items() if name.startswith(kinds)}


def _describe(group: Group) -> str:
    kinds: dict[tuple[int, int], Counter[str]] = {}
    for bundle in group.bundles:
        kinds.setdefault((bundle.cpus, bundle.gpus), Counter())[bundle.name] += 1
    parts = [f"{_names(names)} ({_amount(*kind)} each)" for kind, names in kinds.items()]
    apart = ", each on a node of its own" if group.spread == "strict-spread" else ""
    return " and ".join(parts) + apart


def _names(hosts: Mapping[str, int]) -> str:
    return ", ".join(name if n == 1 else f"{name} on {n} nodes" for name, n in hosts.items())


def _amount(cpus: float, gpus: float) -> str:
    return f"{cpus:g} CPU" + (f" and {gpus:g} GPU" if gpus else "")
