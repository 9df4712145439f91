"""The YAML of a sweep, and the same said by flags: checked here, a frozen plan after.

model: smollm2-135m
serve: {max-model-len: 2048}          # options of `tasuki serve`
workers: 2                            # 2m, 1p1d; or topologies: [1p1d, 2m, ...]
loads:
  - name: chat
    arguments: {input-tokens: 512}    # options of `tasuki bench serve`
    each: {request-rate: [0.5, 1, 2]} # one load for every value
goodput: {load: chat, slo: "ttft=2s,tpot=50ms"}
on: ray                               # a cluster in place of this machine
transport: [cuda_ipc, rdma, tcp]      # each topology by each of them,
spread: [pack, spread]                # and with each of these
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    field_validator,
    model_validator,
)

from tasuki.bench.errors import BenchError
from tasuki.bench.estimate import load_s
from tasuki.bench.goodput import SearchSettings
from tasuki.bench.kinds import each_way
from tasuki.bench.plan import HOW_MUCH, TAKEN, Goal, Load, Plan, load_seed, spread
from tasuki.bench.serve_options import with_flags
from tasuki.bench.topologies import Target, every_split, parse_topology, topology_name
from tasuki.bench.yaml12 import Yaml12
from tasuki.launch.errors import TopologyError

# What the sweep says itself: to `tasuki serve`, to `tasuki bench serve`.
_SERVE_ITSELF = frozenset(
    (
        "model",
        "prefill",
        "decode",
        "mixed",
        "on",
        "port",
        "log-dir",
        "quiet",
        "worker-base-port",
        "control-socket",
        "dry-run",
    )
)
_LOAD_ITSELF = frozenset(("base-url", "model", "output", "topology", "label"))

Scalar = bool | int | float | str
Options = dict[str, Scalar | list[Scalar] | None]
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=80)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    @field_validator("*", mode="before")
    @classmethod
    def _is_no_switch(cls, said: Any) -> Any:
        if isinstance(said, bool):  # which pydantic takes for 1 or 0
            raise ValueError("it is no switch: write a number, a name or a list, as the setting is")
        return said


class TopologyEntry(_Strict):
    """A topology, perhaps with a name or options of its own; a word is the topology alone."""

    topology: str
    name: Name | None = None
    serve: Options = {}

    @model_validator(mode="before")
    @classmethod
    def _from_word(cls, said: Any) -> Any:
        return {"topology": said} if isinstance(said, str) else said


class LoadEntry(_Strict):
    """A load, or one for every combination of values in `each`."""

    name: Name
    arguments: Options = {}
    each: dict[str, list[Scalar]] = {}


class GoodputEntry(_Strict):
    """A goodput search on the arguments of a load, or its own.

    Ranges and defaults of the numbers as in `goodput.SearchSettings`.
    """

    slo: str
    load: str | None = None
    arguments: Options | None = None
    attainment: float | None = None
    confidence: float | None = None
    precision: float | None = None
    start_rate: float | None = None
    min_requests: int | None = None
    min_probe_s: float | None = None
    looks: int | None = None
    max_probes: int | None = None

    def search(self) -> SearchSettings:
        """What was said of the search, the rest as it is there."""
        own = {"slo", "load", "arguments"}
        return SearchSettings(**self.model_dump(exclude=own, exclude_none=True))


class SweepFile(_Strict):
    """A sweep as a person writes it."""

    model: str = "smollm2-135m"
    serve: Options = {}
    workers: int | None = None
    topologies: list[TopologyEntry] | None = None
    on: str | None = None
    transport: list[str] | None = None
    spread: list[str] | None = None
    loads: list[LoadEntry] = []
    goodput: GoodputEntry | None = None
    warmup_requests: int = Field(default=4, ge=0, le=10_000)
    timeout_s: float = Field(default=3600.0, gt=0.0, le=1e6)


def read_sweep(
    file: Path | None, flags: Mapping[str, Any], goal: Mapping[str, Any] | None = None
) -> Plan:
    """The plan of a YAML file, of flags, or of a file of which flags replace parts.

    Args:
        file: The YAML; None: flags say all.
        flags: Top-level settings by name, as in the file.
        goal: `slo` for the loads that have none; with `find`, settings of a
            goodput search that replace or add to the file's.

    Raises:
        BenchError: Naming the file, the setting, its value and the remedy.
    """
    where = "flags" if file is None else str(file)
    said = {} if file is None else _read_yaml(file)
    if {"workers", "topologies"} & flags.keys():
        said = {key: said[key] for key in said if key not in ("workers", "topologies")}
    said = {**said, **flags}
    more = dict(goal or {})
    if more.pop("find", False):
        before = said.get("goodput") or {}
        said["goodput"] = {**before, **more} if isinstance(before, dict) else before
    try:
        sweep = SweepFile.model_validate(said)
    except ValidationError as error:
        raise BenchError(f"{where}: {_first_problem(error)}") from error
    try:
        return make_plan(sweep, more.get("slo"))
    except (BenchError, TopologyError) as error:
        raise BenchError(f"{where}: {error}") from error


def make_plan(sweep: SweepFile, slo: str | None = None) -> Plan:
    """Resolve what was written.

    Args:
        sweep: The settings.
        slo: For loads that say none.

    Raises:
        BenchError: Parts do not fit together.
    """
    serve = with_flags(_options(sweep.serve, "serve", _SERVE_ITSELF), "serve")
    if sweep.on is not None:
        serve["on"] = sweep.on
    said = {"transport": sweep.transport, "spread": sweep.spread}
    kinds = {kind: values for kind, values in said.items() if values is not None}
    targets = each_way(_targets(sweep, serve), kinds)
    loads = _completed([load for entry in sweep.loads for load in _loads(entry)], slo)
    if not loads and sweep.goodput is None:
        raise BenchError("there is nothing to run: give loads, or goodput with an slo")
    _unique("topology", [target.name for target in targets])
    _unique("load", [load.name for load in loads])
    for load in loads:
        if (seconds := load_s(load)) is not None and seconds > sweep.timeout_s:
            raise BenchError(
                f"load {load.name} takes about {seconds:.0f} s, but timeout_s is"
                f" {sweep.timeout_s:g}: raise it, or make the load shorter"
            )
    goal = _goal(sweep)
    if goal is not None and (longest_s := goal.search.longest_s) > sweep.timeout_s:
        raise BenchError(
            f"goodput: a run at start_rate {goal.search.start_rate:g} takes up to"
            f" {longest_s:.0f} s, but timeout_s is {sweep.timeout_s:g}: raise one of them, or"
            " lower the attainment"
        )
    for load in loads:
        if (owner := TAKEN.get(load.name)) is not None:
            raise BenchError(f"a load is called {load.name!r}, which is the {owner}'s: rename it")
    return Plan(
        model=sweep.model,
        targets=tuple(targets),
        loads=tuple(loads),
        goal=goal,
        warmup_requests=sweep.warmup_requests,
        timeout_s=sweep.timeout_s,
    )


def _targets(sweep: SweepFile, common: Mapping[str, Any]) -> list[Target]:
    if (sweep.workers is None) == (sweep.topologies is None):
        raise BenchError("say either topologies (such as [1p1d, 2m]) or workers (such as 2)")
    if sweep.workers is not None:
        return [
            Target(topology_name(t), t, tuple(common.items())) for t in every_split(sweep.workers)
        ]
    if not sweep.topologies:
        raise BenchError("topologies is empty: name at least one, such as 1p1d")
    targets = []
    for one in sweep.topologies:
        topology = parse_topology(one.topology)
        name = one.name or topology_name(topology)
        where = f"topology {name}: serve"
        own = with_flags(_options(one.serve, where, _SERVE_ITSELF), where)
        targets.append(Target(name, topology, tuple({**common, **own}.items())))
    return targets


def _completed(loads: list[Load], slo: str | None) -> list[Load]:
    """Every load with prompts of its own, the same ones for every target.

    Equal prompts in a later load would be found in the prefix cache.
    """
    common = {} if slo is None else {"slo": slo}
    return [
        Load(load.name, {**common, "seed": load_seed(load.name), **load.options}) for load in loads
    ]


def _loads(entry: LoadEntry) -> list[Load]:
    where = f"load {entry.name}"
    options = _options(entry.arguments, where, _LOAD_ITSELF)
    each = _options(entry.each, where, _LOAD_ITSELF)
    for option, values in each.items():
        if not values:
            raise BenchError(f"{where}: each {option} has no values: give at least one")
        if option in options:
            raise BenchError(f"{where}: {option} is in arguments and in each: keep one")
    return spread(entry.name, options, each)


def _goal(sweep: SweepFile) -> Goal | None:
    entry = sweep.goodput
    if entry is None:
        return None
    arguments = entry.arguments
    if arguments is None:
        arguments = _arguments_of(entry.load, sweep.loads)
    options = _options(arguments, "goodput", _LOAD_ITSELF)
    return Goal(
        slo=entry.slo,
        options={name: value for name, value in options.items() if name not in HOW_MUCH},
        search=entry.search(),
    )


def _arguments_of(name: str | None, loads: list[LoadEntry]) -> Options:
    """The arguments of the load called `name`, or of the only one."""
    names = [load.name for load in loads]
    if name is None and len(names) == 1:
        return loads[0].arguments
    if name not in names:
        raise BenchError(
            f"goodput: load is {name!r}: name one of {', '.join(names) or 'the loads'}, "
            "or give arguments"
        )
    return loads[names.index(name)].arguments


def _options(given: Mapping[str, Any], where: str, reserved: frozenset[str]) -> dict[str, Any]:
    """`given` with dashes in the names.

    Raises:
        BenchError: One of them is the sweep's own business, or no option's name.
    """
    options = {name.removeprefix("--").replace("_", "-"): value for name, value in given.items()}
    for name in options:
        if name in reserved:
            raise BenchError(f"{where}: {name} is set by the sweep itself: take it out")
        if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
            raise BenchError(f"{where}: {name!r} is no option's name: write such as max-model-len")
    return options


def _unique(kind: str, names: list[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise BenchError(
                f"{names.count(name)} {kind} entries are called {name!r}: give each its own name"
            )


def _read_yaml(file: Path) -> dict[str, Any]:
    try:
        content = yaml.load(file.read_text(encoding="utf-8"), Loader=Yaml12)
    except OSError as error:
        raise BenchError(f"{file} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        problem = " ".join(str(error).split())
        raise BenchError(f"{file} is no YAML: {problem}") from error
    if content is None:
        raise BenchError(f"{file} is empty: write settings, such as loads:")
    if not isinstance(content, dict):
        raise BenchError(f"{file} holds a {type(content).__name__}: write settings, such as loads:")
    return content


def _first_problem(error: ValidationError) -> str:
    first = error.errors()[0]
    path = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        known = _fields_at(first["loc"])
        return f"{path} is no setting: there is {', '.join(known)}"
    if first["type"] == "missing":
        return f"{path} is missing: add it"
    message = first["msg"].removeprefix("Value error, ")
    return f"{path} is {first['input']!r}: {message[:1].lower()}{message[1:]}"


def _fields_at(location: tuple[int | str, ...]) -> list[str]:
    models: dict[str, type[BaseModel]] = {
        "loads": LoadEntry,
        "goodput": GoodputEntry,
        "topologies": TopologyEntry,
    }
    model = models.get(str(location[0])) if len(location) > 1 else None
    return list((model or SweepFile).model_fields)
