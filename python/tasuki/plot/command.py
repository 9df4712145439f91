"""`tasuki plot`: result files in, pictures out. Loads no drawing library before it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tasuki.plot.errors import PlotError
from tasuki.plot.options import Against, Options, Statistic, Throughput, parse_slo

FIGURES = (
    "pareto",
    "load",
    "goodput",
    "phases",
    "cdf",
    "compare",
    "timeline",
    "ttft",
    "steps",
    "links",
    "plan",
    "roles",
)
_OTHER_PICTURES = (".gif", ".jpeg", ".jpg", ".pdf", ".ps", ".svg", ".svgz", ".webp")
_LIBRARIES = ("matplotlib", "PIL", "plotly")  # the extra `plot`

_HELP = """Draw results: PNGs to look at and one HTML page to explore.

\b
  tasuki plot sweep/                     everything that the data allows
  tasuki plot pareto sweep/ --per-gpu    one figure
  tasuki plot a@2=runs/a b@4=runs/b      other tools' files, named, GPUs given

A result is a file or a folder, searched to any depth, of tasuki bench, vllm bench
serve, SGLang bench_serving, genai-bench, evalscope or AIPerf, or a request log of the
router; which one is told by content.
LABEL=PATH names the line that it becomes, LABEL@GPUS=PATH says its GPUs too.

\b
Figures:
  pareto    throughput against latency, one line per topology, and the frontier
  load      throughput and latencies as the load grows
  goodput   requests per second within the SLO
  phases    where the time to the second token goes
  cdf       distributions of TTFT, TTST, TPOT, ITL and E2E
  compare   TTFT, TPOT and throughput of several runs over time: measured and simulated
  timeline  one run request by request, throughput and requests in flight below
  ttft      TTFT against batch x input length
  steps     engine steps and KV transfers, of tasuki bench batch --steps
  links     rate and posting by block size, of tasuki linkbench
  plan      designs, Pareto front and the chosen one, of tasuki plan
  roles     workers by role, load and goodput over time, of benchmarks/roles_follow.py
"""


def plot(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[FIGURE] RESULT...", help="A figure's name (all without), then results."
        ),
    ],
    *,
    out: Annotated[
        Path,
        typer.Option(
            "--out", "-o", help="Folder for everything, or one file that ends in .png or .html."
        ),
    ] = Path("plots"),
    throughput: Annotated[
        Throughput, typer.Option(help="What pareto and load count.")
    ] = Throughput.output,
    against: Annotated[
        Against,
        typer.Option(
            help="What pareto sets it against; chunk is (N - 1) x TPOT + TTFT,"
            " interactivity is 1 / TPOT."
        ),
    ] = Against.tpot,
    statistic: Annotated[
        Statistic, typer.Option("--stat", help="Which value stands for a run's requests.")
    ] = Statistic.median,
    per_gpu: Annotated[
        bool,
        typer.Option(
            "--per-gpu", help="Divide by all GPUs of the topology (by workers without GPUs)."
        ),
    ] = False,
    chunk: Annotated[
        int, typer.Option(min=1, metavar="N", help="Tokens of a chunk, for --against chunk.")
    ] = 16,
    slo: Annotated[
        str, typer.Option(help="Limits to draw, like ttft=2s,tpot=50ms; else the results' own.")
    ] = "",
    load: Annotated[
        str,
        typer.Option(help='Load that cdf and timeline show, as labelled: "4/s", "c=32".'),
    ] = "",
    rows: Annotated[int, typer.Option(min=1, help="Most requests drawn in a timeline.")] = 400,
) -> None:
    options = Options(
        throughput=throughput,
        against=against,
        statistic=statistic,
        per_gpu=per_gpu,
        chunk=chunk,
        slo_ms=parse_slo(slo),
        load=load,
        rows=rows,
    )
    figure, sources = (words[0], words[1:]) if words[0] in FIGURES else ("", words)
    if not figure and words[0].isidentifier() and not Path(words[0]).exists():
        raise PlotError(
            f"{words[0]} is neither a figure nor a file or folder: figures are {', '.join(FIGURES)}"
        )
    check_out(out)
    if not sources:
        raise PlotError(f"{figure}: say which results, like `tasuki plot {figure} FOLDER`")
    for path in draw(figure, sources, options, out):
        print(path)


def check_out(out: Path) -> None:
    """Refuse a picture of another kind: its name would become that of a folder.

    Raises:
        PlotError: The name ends as such pictures do.
    """
    if out.suffix.lower() in _OTHER_PICTURES and not out.is_dir():
        raise PlotError(
            f"{out} ends in {out.suffix}: end it in .png or .html, or name a folder, which gets"
            " both"
        )


def draw(figure: str, sources: list[str], options: Options, out: Path) -> list[Path]:
    """Draw results.

    Args:
        figure: The one to draw; empty: all that the results allow.
        sources: Results, as on the command line.
        options: What the command line chooses.
        out: A folder, or one file that ends in .png or .html.

    Returns:
        The files written.

    Raises:
        PlotError: Nothing to draw, a library is missing, or `out` cannot hold it.
    """
    try:
        from tasuki.plot.write import write
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _LIBRARIES:
            raise
        raise PlotError(
            f"drawing requires {error.name}, which is not installed: pip install 'tasuki[plot]'"
        ) from error
    return write(figure, sources, options, out)


plot.__doc__ = _HELP
