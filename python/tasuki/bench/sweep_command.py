"""`tasuki bench sweep`: from words to a plan, and through it. Composes, decides nothing."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tasuki.bench.errors import BenchError
from tasuki.bench.pairs import split_pair
from tasuki.command_line import described, end_like_interrupted

if TYPE_CHECKING:
    from tasuki.bench.plan import Plan
    from tasuki.bench.sweep_state import SweepState

_INTERRUPTED = 130


File = Annotated[Path | None, typer.Argument(help="A YAML file; options replace parts of it.")]
Model = Annotated[str | None, described("Served by every topology [smollm2-135m].")]
Topologies = Annotated[
    str | None, described("Such as 1p1d,2m: prefill, decode, mixed workers.", metavar="NAMES")
]
Workers = Annotated[
    int | None, described("Colocated against every prefill:decode ratio of so many workers.")
]
On = Annotated[
    str | None,
    described("Where workers run: ray or ray://HOST:PORT [this machine].", "--on", metavar="PLACE"),
]
Transports = Annotated[
    str | None,
    described(
        "Every topology by each of these transports, such as cuda_ipc,rdma,tcp.",
        "--transport",
        metavar="NAMES",
    ),
]
Spreads = Annotated[
    str | None,
    described(
        "Every topology with each spread over the nodes of the cluster, such as pack,spread.",
        "--spread",
        metavar="NAMES",
    ),
]
Serve = Annotated[
    list[str] | None,
    described("Option of `tasuki serve`, a flag as NAME=true; repeatable.", metavar="NAME=VALUE"),
]
LoadWords = Annotated[
    list[str] | None,
    described(
        "A name and options of `tasuki bench serve`, such as 'chat --input-tokens 512 "
        "--num-requests 60'; repeatable.",
        metavar="WORDS",
    ),
]
Each = Annotated[
    list[str] | None,
    described(
        "Every --load once for each value, such as request-rate=0.5,1,2; repeatable.",
        metavar="NAME=VALUES",
    ),
]
FindGoodput = Annotated[
    bool, described("Search each topology's highest rate that meets --slo.", "--find-goodput")
]
SloText = Annotated[
    str | None, described("Objectives, such as ttft=2s,tpot=50ms; for loads as well.")
]
Attainment = Annotated[
    float | None, described("Share of requests that must meet the objectives [0.9].")
]
Confidence = Annotated[float | None, described("Of the goodput found [0.95].")]
Precision = Annotated[float | None, described("Relative width at which the search stops [0.1].")]
StartRate = Annotated[float | None, described("First rate of the search, requests/s [1].")]
MaxProbes = Annotated[int | None, described("Rates that a search may try [14].")]
Output = Annotated[
    Path | None, described("Folder of the results [results/NAME of the file].", "--output", "-o")
]
Fresh = Annotated[bool, described("Measure anew what the folder holds.", "--fresh")]
DryRun = Annotated[bool, described("Show the plan and about how long it takes.", "--dry-run")]


def sweep(
    *,
    file: File = None,
    model: Model = None,
    topologies: Topologies = None,
    workers: Workers = None,
    on: On = None,
    transport: Transports = None,
    spread: Spreads = None,
    serve: Serve = None,
    load: LoadWords = None,
    each: Each = None,
    find_goodput: FindGoodput = False,
    slo: SloText = None,
    attainment: Attainment = None,
    confidence: Confidence = None,
    precision: Precision = None,
    start_rate: StartRate = None,
    max_probes: MaxProbes = None,
    output: Output = None,
    fresh: Fresh = False,
    dry_run: DryRun = False,
) -> None:
    """Measure topologies under loads: each one started, warmed, loaded, stopped.

    One folder holds all results; an interrupted sweep goes on where it was.
    """
    flags: dict[str, Any] = {}
    if model is not None:
        flags["model"] = model
    if workers is not None:
        flags["workers"] = workers
    if on is not None:
        flags["on"] = on
    for setting, names in (
        ("topologies", topologies),
        ("transport", transport),
        ("spread", spread),
    ):
        if names is not None:
            flags[setting] = [name.strip() for name in names.split(",")]
    if serve:
        flags["serve"] = dict(split_pair(pair, "--serve") for pair in serve)
    if load:
        flags["loads"] = _loads(load, each)
    elif each:
        raise BenchError("--each needs --load: in a file, write each: below the load")
    search: dict[str, Any] = {
        "attainment": attainment,
        "confidence": confidence,
        "precision": precision,
        "start_rate": start_rate,
        "max_probes": max_probes,
    }
    folder = output or Path("results", "sweep" if file is None else file.stem)
    said = {name: value for name, value in search.items() if value is not None}
    if find_goodput and file is None and not each and len(flags.get("loads", ())) == 1:
        # Only the search needs it: nothing says how fast the load itself should come.
        said["arguments"] = flags.pop("loads")[0]["arguments"]
    raise typer.Exit(_run(file, flags, folder, fresh, dry_run, _goal(find_goodput, slo, said)))


def _goal(find_goodput: bool, slo: str | None, said: dict[str, Any]) -> dict[str, Any]:
    if not find_goodput and said:
        raise BenchError(f"--{next(iter(said)).replace('_', '-')} belongs to --find-goodput")
    if find_goodput and slo is None:
        raise BenchError("--find-goodput needs objectives: --slo ttft=2s,tpot=50ms")
    return {**said, "slo": slo, "find": find_goodput}


def _loads(load: list[str], each: list[str] | None) -> list[dict[str, Any]]:
    spread = dict(split_pair(pair, "--each") for pair in each or ())
    values = {name: text.split(",") for name, text in spread.items()}
    return [{**parse_load(words), "each": values} for words in load]


def _run(
    file: Path | None,
    flags: dict[str, Any],
    folder: Path,
    fresh: bool,
    dry_run: bool,
    goal: dict[str, Any],
) -> int:
    from tasuki.bench.check_loads import check_loads
    from tasuki.bench.header import check_writable
    from tasuki.bench.serve_options import check_values
    from tasuki.bench.sweep_file import read_sweep
    from tasuki.bench.sweep_state import SweepState
    from tasuki.launch.supervisor import say
    from tasuki.models.cache import exclusive
    from tasuki.models.fetch import may_be_fetched, model_path, resolve_model

    plan = read_sweep(file, flags, goal)
    for target in plan.targets:
        check_values(target.topology, plan.serve_options(target), f"topology {target.name}")
    absent = dry_run and may_be_fetched(plan.model)
    tokenizer = model_path(plan.model) if absent else resolve_model(plan.model)
    end_like_interrupted()
    try:
        check_loads(plan, tokenizer)
    except KeyboardInterrupt:
        say("interrupted; nothing was started")
        return _INTERRUPTED
    with ExitStack() as held:
        if not dry_run:
            check_writable(folder / "sweep.json")
            held.enter_context(exclusive(folder / ".lock", lambda: _refuse(folder)))
        state = SweepState(plan, folder, fresh and not dry_run)
        return _sweep(plan, state, tokenizer, folder, dry_run)


def _refuse(folder: Path) -> None:
    raise BenchError(f"another sweep writes to {folder}: wait for its end, or choose --output")


def _sweep(
    plan: Plan, state: SweepState, tokenizer: Path | None, folder: Path, dry_run: bool
) -> int:
    from tasuki.bench.estimate import estimate
    from tasuki.launch.supervisor import say

    if dry_run:
        for point in plan.all_points():
            print(f"{point.key}: {state.points[point.key].state}")
    left = sum(not state.is_done(point) for point in plan.all_points())
    say(f"{left} of {len(plan.all_points())} points to measure: {estimate(plan, state)}")
    say(f"results in {folder}")
    if dry_run or tokenizer is None:
        return 0
    try:
        failed = _measure(plan, state, tokenizer, say)
    except KeyboardInterrupt:
        say("interrupted; the same command goes on from here")
        return _INTERRUPTED
    _show(plan, state)
    say(f"done; look at it: tasuki plot {folder}")
    return 1 if failed else 0


def _measure(plan: Plan, state: SweepState, tokenizer: Path, say: Callable[[str], None]) -> int:
    from tasuki.bench.load import LoadRun, run_load
    from tasuki.bench.serving import Serving
    from tasuki.bench.sweep import Sweep
    from tasuki.bench.topologies import Target
    from tasuki.launch.config import LOCAL
    from tasuki.launch.place import count_gpus

    def deploy(target: Target, log: Path) -> Serving:
        options = plan.serve_options(target)
        return Serving(target.topology, options, log, dict(target.environment))

    def measure(run: LoadRun) -> dict[str, Any]:
        return run_load(run, {"tokenizer": tokenizer})

    gpus = count_gpus(plan.targets[0].options.get("on", LOCAL))
    return Sweep(plan, state, deploy, measure, say, gpus).run()


def _show(plan: Plan, state: SweepState) -> None:
    """Tables of what is done: runs, then searches."""
    from tasuki.bench.header import read_result
    from tasuki.bench.plan import Load
    from tasuki.bench.sweep_table import goodput_table, sweep_table

    done = [point for point in plan.all_points() if state.is_done(point)]
    loads = [point for point in done if isinstance(point.work, Load)]
    searches = [point for point in done if point not in loads]
    if loads:
        print(sweep_table((p.name, read_result(state.path(p), "serve")) for p in loads))
    if searches:
        print(goodput_table(read_result(state.path(p), "goodput") for p in searches))


def parse_load(said: str) -> dict[str, Any]:
    """A load's entry from `NAME --option value --flag ...`.

    Raises:
        BenchError: It does not begin with a name, or a word is nobody's value.
    """
    try:
        rest = shlex.split(said)
    except ValueError as error:
        raise BenchError(f"--load is {said!r}: {error}") from error
    if not rest:
        raise BenchError(f"--load is {said!r}: begin with a name")
    name = rest.pop(0)
    arguments: dict[str, Any] = {}
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            raise BenchError(f"--load {name}: {word!r} is no option: write --name value")
        option, found, value = word.removeprefix("--").partition("=")
        if not found:
            bare = not rest or rest[0].startswith("--")
            arguments[option] = True if bare else rest.pop(0)
        else:
            arguments[option] = value
    return {"name": name, "arguments": arguments}
