"""Do `tasuki bench serve`, `vllm bench serve` and `aiperf` tell the same of a real server?

    python benchmarks/clients_on_a_real_server.py --vllm VENV/bin/vllm --aiperf VENV/bin/aiperf

One `tasuki serve --mixed 1` with the default model; the clients take turns against it, in an
order that rotates with the round: closed loop, fixed lengths, greedy, no warm-up, prompts new
in every run. The server's own counts of prompt tokens and of those in its prefix cache are
kept for each run, so that one can see that all got the same work.

Server and clients have cores of their own (half of them each). The peers' clients need about ten
seconds of processor time a run; on shared cores they would slow down what they measure,
and the difference would tell what a client costs (see client_vs_peers.py), not what it says.

One request at a time by default. With more, the millisecond that a client takes to send again
decides which step of the engine the next request joins, and the server itself works in one of
several ways (two at a time: first tokens after 147 and 147 ms, or 87 and 176).

Throughput, TTFT from sending and TPOT of a run are one observation each, so the rounds are the
sample: ours - the peer's mean, with Welch's 95% confidence interval. Six intervals are told
and not corrected for that: of six true agreements, one at least misses 0 in up to a quarter of
all experiments. An interval that holds 0 says as much as it is narrow: see its width in %.

Writes benchmarks/results/clients_on_a_real_server.json, prints the table of RESULTS.md.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import httpx
from client_vs_peers import MODEL, REPOSITORY, Client, Load, Seen, clients_of, parser_of
from split_vs_colocated import others_cpu_s, serve

from tasuki.bench.header import header, write_result

RESULT = REPOSITORY / "benchmarks" / "results" / "clients_on_a_real_server.json"
FIGURES = {
    "output_throughput": "output tok/s",
    "ttft_ms": "TTFT from sending, ms",
    "tpot_ms": "TPOT, ms",
}
# Student's t, two-sided 95%, of 1 to 30 degrees of freedom.
# Source: NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.6.7.2.
STUDENT_T = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


@dataclass(frozen=True)
class Interval:
    """A difference of two means and its 95% confidence interval, all in one unit."""

    difference: float
    low: float
    high: float

    @property
    def holds_zero(self) -> bool:
        return self.low <= 0 <= self.high


@dataclass(frozen=True)
class Run:
    """One client's turn: what it saw, and what the server and the machine say of it.

    Attributes:
        prompt_tokens: that the server got.
        cached_tokens: of these, found in its prefix cache.
        other_cores: what other processes used meanwhile.
    """

    seen: Seen
    prompt_tokens: int
    cached_tokens: int
    other_cores: float


def welch(ours: list[float], theirs: list[float]) -> Interval:
    """The difference of two means whose variances may differ, with 95% confidence.

    The degrees of freedom are rounded down to what STUDENT_T has, which widens the interval.

    Source: B. L. Welch, "The generalization of 'Student's' problem when several different
    population variances are involved", Biometrika 34 (1947), 28-35.
    """
    errors = [statistics.variance(sample) / len(sample) for sample in (ours, theirs)]
    difference = statistics.fmean(ours) - statistics.fmean(theirs)
    if not sum(errors):
        return Interval(difference, difference, difference)
    parts = zip(errors, (ours, theirs), strict=True)
    freedom = sum(errors) ** 2 / sum(e**2 / (len(sample) - 1) for e, sample in parts)
    half = STUDENT_T[min(int(freedom), len(STUDENT_T)) - 1] * math.sqrt(sum(errors))
    return Interval(difference, difference - half, difference + half)


@contextmanager
def on_cores(cores: list[int]) -> Iterator[None]:
    """What this thread starts within the block runs on these cores only."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def prompt_tokens(url: str) -> tuple[int, int]:
    """Prompt tokens that the server has got so far, and those it found in its prefix cache."""
    text = httpx.get(f"{url}/metrics").text
    counts = (
        re.findall(rf"^tasuki_{name}_total(?:{{.*}})? (\d+)", text, re.M)
        for name in ("prompt_tokens", "worker_prompt_tokens_cached")
    )
    got, cached = (sum(map(int, found)) for found in counts)
    return got, cached


def take_turn(client: Client, url: str, load: Load) -> Run:
    """One run of one client."""
    tokens, cpu_s, begin_s = prompt_tokens(url), others_cpu_s(), time.monotonic()
    seen = client.run(url, load)
    wall_s = time.monotonic() - begin_s
    # A client that has ended is no child any more: what it used is subtracted here.
    other_cores = (others_cpu_s() - cpu_s - seen.cpu_s) / wall_s
    got, cached = (now - then for now, then in zip(prompt_tokens(url), tokens, strict=True))
    return Run(seen, got, cached, max(0.0, other_cores))


def measure(args: argparse.Namespace, load: Load) -> dict[str, list[Run]]:
    """Every client's runs, after one of ours that warms the server up."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("there is 1 core, and server and client need one each")
    half = len(cores) // 2
    clients = clients_of(args)
    runs: dict[str, list[Run]] = {client.name: [] for client in clients}
    model = argparse.Namespace(model=args.model, dtype=args.dtype, vocabulary=0)
    with (
        on_cores(cores[:half]),
        serve(["--mixed", "1", "--served-model-name", MODEL], model) as server,
        on_cores(cores[half:]),
    ):
        clients[0].run(server.url, load)
        for number in range(args.rounds):
            turn = number % len(clients)
            for client in clients[turn:] + clients[:turn]:
                run = take_turn(client, server.url, replace(load, seed=1 + number))
                runs[client.name].append(run)
                print(f"round {number}, {client.name}: {run}", file=sys.stderr)
    return runs


def compare(runs: dict[str, list[Run]]) -> dict[str, dict[str, Interval]]:
    """Ours - each peer's, by peer and figure."""
    samples = {
        name: {figure: [getattr(run.seen, figure) for run in all_] for figure in FIGURES}
        for name, all_ in runs.items()
    }
    ours, *peers = samples
    return {
        peer: {figure: welch(samples[ours][figure], samples[peer][figure]) for figure in FIGURES}
        for peer in peers
    }


def table(runs: dict[str, list[Run]], intervals: dict[str, dict[str, Interval]]) -> str:
    """The tables of RESULTS.md."""

    def mean(name: str, figure: str) -> float:
        return statistics.fmean(getattr(run.seen, figure) for run in runs[name])

    lines = [
        "| | ours | its | ours - its, 95% interval | in % of its | 0 inside |",
        "|---|---|---|---|---|---|",
    ]
    ours = next(iter(runs))
    for peer, by_figure in intervals.items():
        for figure, interval in by_figure.items():
            its = mean(peer, figure)
            low, high = (f"{edge / its:+.2%}" for edge in (interval.low, interval.high))
            lines.append(
                f"| {peer}: {FIGURES[figure]} | {mean(ours, figure):,.2f} | {its:,.2f} |"
                f" {interval.difference:+.2f} ({interval.low:+.2f} to {interval.high:+.2f}) |"
                f" {low} to {high} | {'yes' if interval.holds_zero else '**no**'} |"
            )
    lines += [
        "",
        "| | prompt tokens a run | in the prefix cache | others, cores |",
        "|---|---|---|---|",
    ]
    for name, all_ in runs.items():
        prompt, cached = (
            {getattr(run, key) for run in all_} for key in ("prompt_tokens", "cached_tokens")
        )
        lines.append(
            f"| {name} | {min(prompt):,} to {max(prompt):,} | {min(cached)} to {max(cached)} |"
            f" {max(run.other_cores for run in all_):.2f} at most |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = parser_of(__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--input-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--output", type=Path, default=RESULT)
    args = parser.parse_args()
    if args.rounds < 2:
        parser.error(f"--rounds is {args.rounds}, and a variance needs 2 at least")
    load = Load(args.requests, args.output_tokens, args.concurrency, args.input_tokens, warmups=0)
    begin_s = time.monotonic()
    runs = measure(args, load)
    intervals = compare(runs)
    described = header("clients_on_a_real_server", label="clients", topology=None, model=args.model)
    document = described | {
        "dtype": args.dtype,
        "load": asdict(load),
        "duration_s": time.monotonic() - begin_s,
        "runs": {name: [asdict(run) for run in all_] for name, all_ in runs.items()},
        "ours_minus_its": {
            peer: {
                figure: asdict(interval) | {"holds_zero": interval.holds_zero}
                for figure, interval in by_figure.items()
            }
            for peer, by_figure in intervals.items()
        },
    }
    write_result(args.output, document)
    print(table(runs, intervals))


if __name__ == "__main__":
    main()
