"""What a deployment asks of a cluster, and how it is told that there is no room: pure.

A worker is a *bundle* of resources, which one node gives. Bundles that are spread together
are a *group*.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tasuki.launch.config import ServeConfig
from tasuki.launch.engine import Member

STRATEGIES = {"pack": "PACK", "spread": "SPREAD", "strict-spread": "STRICT_SPREAD"}


@dataclass(frozen=True, slots=True)
class Bundle:
    """What one worker has to itself.

    Attributes:
        name: The worker's.
        cpus: CPUs, 1 or more.
        gpus: GPUs, one for each rank; 0 on the CPU.
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
        spread: One of `config.SPREADS`.
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
    """The groups of some workers: one of all roles, and one of each role that is said apart."""
    groups: dict[tuple[str, str], list[Bundle]] = {}
    for name, role in members:
        ranks = config.ranks_of(role)
        bundle = Bundle(name, config.worker_cpus or ranks, ranks if on_gpus else 0)
        groups.setdefault(config.topology.spread_of(role), []).append(bundle)
    return [Group(how, tuple(bundles)) for (_, how), bundles in groups.items()]


def no_room(groups: Sequence[Group], nodes: Sequence[Node]) -> str:
    """Why these groups have no place: what is asked, what there is, and what helps."""
    asked = "; ".join(_describe(group) for group in groups)
    have = ", ".join(f"{n.address}: {_amount(n.cpus, n.gpus)}" for n in nodes) or "no node"
    return (
        f"the Ray cluster has no room for {asked}; its nodes have {have}: add nodes, or ask for"
        " less (--prefill, --decode, --mixed, --tp-*, --worker-cpus, --spread)"
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
    apart = [group.bundles for group in groups if group.spread == "strict-spread"]
    return any(_lack_nodes(each, nodes) for each in apart)


def _lack_nodes(bundles: Sequence[Bundle], nodes: Sequence[Node]) -> bool:
    """Whether there are fewer nodes for some bundles and larger ones than there are of these."""

    def needing(least: Bundle) -> int:
        return sum(b.cpus >= least.cpus and b.gpus >= least.gpus for b in bundles)

    def having(least: Bundle) -> int:
        return sum(n.cpus >= least.cpus and n.gpus >= least.gpus for n in nodes)

    return any(having(bundle) < needing(bundle) for bundle in bundles)


def at_address(arguments: Sequence[str], host: str, port: int) -> list[str]:
    """A worker's arguments with the address that it binds."""
    words = list(arguments)
    for flag, value in (("--host", host), ("--port", str(port))):
        words[words.index(flag) + 1] = value
    return words


def passed_on(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables of the launcher that its workers on other nodes get, too: of libraries alone."""
    kinds = ("UCX_", "NIXL_", "NCCL_", "GLOO_", "HF_", "OMP_")
    return {name: value for name, value in environment.items() if name.startswith(kinds)}


def _describe(group: Group) -> str:
    kinds: dict[tuple[int, int], list[str]] = {}
    for bundle in group.bundles:
        kinds.setdefault((bundle.cpus, bundle.gpus), []).append(bundle.name)
    parts = [f"{', '.join(names)} ({_amount(*kind)} each)" for kind, names in kinds.items()]
    apart = ", each on a node of its own" if group.spread == "strict-spread" else ""
    return " and ".join(parts) + apart


def _amount(cpus: float, gpus: float) -> str:
    return f"{cpus:g} CPU" + (f" and {gpus:g} GPU" if gpus else "")
