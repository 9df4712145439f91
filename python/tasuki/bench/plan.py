"""What a sweep will do: targets x loads, each a point with a fingerprint. Pure."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tasuki.bench.arguments import is_secret, text, without_key, without_secrets
from tasuki.bench.goodput import SearchSettings
from tasuki.bench.topologies import Target, topology_name

GOODPUT = "goodput"  # the name of the search's point
# No load may be called so: results and logs have these names.
TAKEN = {GOODPUT: "search", "serve": "server", "warmup": "warm-up"}

# Options of `tasuki bench serve` that say how much is sent, how fast and with
# what prompts: searches and warm-ups say them themselves.
HOW_MUCH = frozenset(
    (
        "arrival",
        "burstiness",
        "duration-s",
        "max-concurrency",
        "num-requests",
        "ramp-s",
        "request-rate",
        "seed",
        "slo",
    )
)
_TURNS = 4  # of `tasuki bench serve --workload multi-turn` without --turns
# Seeds of warm-ups and probes, away from those of loads: no prompt may come twice.
WARMUP_SEED = 1 << 33
PROBE_SEED = 1 << 34


@dataclass(frozen=True, slots=True)
class Load:
    """One way to load a deployment.

    Attributes:
        name: Of its result file.
        options: Of `tasuki bench serve`, by name.
    """

    name: str
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Goal:
    """A goodput search.

    Attributes:
        slo: As `tasuki bench serve --slo` takes it.
        options: Of `tasuki bench serve` but for arrivals and number of requests.
        search: How to search.
    """

    slo: str
    options: Mapping[str, Any]
    search: SearchSettings


@dataclass(frozen=True, slots=True)
class Point:
    """One measurement of one target: a load, or a goodput search."""

    target: Target
    name: str
    work: Load | Goal

    @property
    def key(self) -> str:
        """`1p1d/chat`: unique in a plan, and the result's path without `.json`."""
        return f"{self.target.name}/{self.name}"


@dataclass(frozen=True, slots=True)
class Plan:
    """A whole sweep.

    Attributes:
        model: What every target serves.
        targets: Deployments, in the order in which they are measured.
        loads: What each of them gets, in this order.
        goal: A search at the end of each target's turn; None: none.
        warmup_requests: Sent to a fresh deployment before anything is measured.
        timeout_s: A run of one load that takes longer has failed.
    """

    model: str
    targets: tuple[Target, ...]
    loads: tuple[Load, ...]
    goal: Goal | None = None
    warmup_requests: int = 4
    timeout_s: float = 3600.0

    def points(self, target: Target) -> Iterator[Point]:
        """What is measured on one target, in order."""
        for load in self.loads:
            yield Point(target, load.name, load)
        if self.goal is not None:
            yield Point(target, GOODPUT, self.goal)

    def all_points(self) -> list[Point]:
        """Every point of every target."""
        return [point for target in self.targets for point in self.points(target)]

    def serve_options(self, target: Target) -> dict[str, Any]:
        """All options of `tasuki serve` for a target, but for its topology."""
        return {"model": self.model, **target.options}

    def fingerprint(self, point: Point) -> str:
        """Equal for points that measure the same in the same way."""
        environment = dict(point.target.environment)
        said = {
            "serve": self.serve_options(point.target),
            **({"environment": environment} if environment else {}),
            "topology": topology_name(point.target.topology),
            "warmup_requests": self.warmup_requests,
            # A new key of the server measures the same.
            "work": asdict(point.work) | {"options": without_key(point.work.options)},
        }
        canonical = json.dumps(said, sort_keys=True, default=str)
        return hashlib.blake2b(canonical.encode(), digest_size=16).hexdigest()

    def describe(self) -> dict[str, Any]:
        """The plan as `sweep.json` keeps it: without keys and headers."""
        return {
            "model": self.model,
            "topologies": [
                {
                    "name": target.name,
                    "topology": topology_name(target.topology),
                    "serve": target.options,
                    **({"environment": dict(e)} if (e := target.environment) else {}),
                }
                for target in self.targets
            ],
            "loads": [_describe(load) for load in self.loads],
            "goodput": None if self.goal is None else _describe(self.goal),
            "warmup_requests": self.warmup_requests,
            "timeout_s": self.timeout_s,
        }


def _describe(work: Load | Goal) -> dict[str, Any]:
    return asdict(work) | {"options": without_secrets(work.options)}


def load_seed(name: str) -> int:
    """A seed of 32 bits that depends on the load's name only, not on its neighbours."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "big")


def turns(options: Mapping[str, Any]) -> int:
    """Requests that come of each arrival: a rate is that of first turns."""
    if options.get("workload") != "multi-turn":
        return 1
    return int(options.get("turns", _TURNS))


def spread(name: str, options: Mapping[str, Any], each: Mapping[str, Sequence[Any]]) -> list[Load]:
    """One load for every combination of the values in `each`.

    Args:
        name: `chat` becomes `chat-request-rate-0.5` and so on. Keys and headers, which are in no
            file's name, have numbers instead: `chat-api-key-1`.
        options: What all have in common.
        each: Values by option.
    """
    ways = [
        [(option, value, _word(option, value, number)) for number, value in enumerate(values, 1)]
        for option, values in each.items()
    ]
    loads = []
    for way in itertools.product(*ways):
        parts = [f"{option}-{word}" for option, _, word in way]
        called = re.sub(r"[^A-Za-z0-9._-]+", "_", "-".join([name, *parts]))
        loads.append(Load(called, {**options, **{option: value for option, value, _ in way}}))
    return loads


def _word(option: str, value: Any, number: int) -> str:
    return str(number) if is_secret(option) else text(value)
