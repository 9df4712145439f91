"""Every figure by the name that the command line knows."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tasuki.plot.errors import PlotError
from tasuki.plot.figures.batch import ttft
from tasuki.plot.figures.cdf import cdf
from tasuki.plot.figures.compare import compare
from tasuki.plot.figures.goodput import goodput
from tasuki.plot.figures.links import links
from tasuki.plot.figures.load import load
from tasuki.plot.figures.marks import Figure
from tasuki.plot.figures.pareto import pareto
from tasuki.plot.figures.phases import phases
from tasuki.plot.figures.plan import plan
from tasuki.plot.figures.roles import roles
from tasuki.plot.figures.steps import steps
from tasuki.plot.figures.timeline import timeline
from tasuki.plot.options import Options
from tasuki.plot.run import Results

_Make = Callable[[Results, Options, Mapping[str, int]], list[Figure]]

# In the order of the page: each with what it needs.
_FIGURES: dict[str, tuple[_Make, str]] = {
    "pareto": (pareto, "runs with throughput and the latency asked for"),
    "load": (load, "runs of one workload at two rates, or two concurrencies, or more"),
    "goodput": (goodput, "runs with an SLO, or searches by `tasuki bench sweep --find-goodput`"),
    "phases": (phases, "runs against Tasuki, which accounts for its time"),
    "cdf": (cdf, "runs with latencies"),
    "compare": (compare, "two runs of one workload and load whose files keep the requests' times"),
    "timeline": (timeline, "runs whose files keep the requests' times"),
    "ttft": (ttft, "tables by `tasuki bench batch`"),
    "steps": (steps, "tables by `tasuki bench batch --steps`"),
    "links": (links, "results of `tasuki linkbench`"),
    "plan": (plan, "plans by `tasuki plan --output`"),
    "roles": (roles, "timelines of `benchmarks/roles_follow.py`"),
}

NAMES = tuple(_FIGURES)


def figures(results: Results, options: Options, name: str = "") -> list[Figure]:
    """What can be drawn.

    Args:
        results: What was measured.
        options: What the command line chooses.
        name: One figure; empty: all that the results allow.

    Raises:
        PlotError: The results do not allow it.
    """
    colors = {label: i for i, label in enumerate(results.labels)}
    if name:
        make, needs = _FIGURES[name]
        found = make(results, options, colors)
        if not found:
            raise PlotError(f"{name}: needs {needs}; the results have none")
        return found
    found = [figure for make, _ in _FIGURES.values() for figure in make(results, options, colors)]
    if not found:
        raise PlotError("the results allow no figure: their runs have no numbers to draw")
    return found
