"""How long the policy takes to place a request, by number of workers; two revisions by turns.

    python benchmarks/placement.py --before REVISION --output benchmarks/results/placement.json

A third of the workers each prefill, decode and mixed, in one domain, eight on a machine. Of
this tree: a placement after the change of one worker's load, where all loads are random and where
all workers are idle, and the change alone. The other revision runs its own
`crates/policy/examples/placement_time.rs`, and gives what that measures of these, in this order.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import tempfile
from pathlib import Path

from tasuki.bench.header import header, write_result

ROOT = Path(__file__).parents[1]
EXAMPLE = Path("crates/policy/examples/placement_time.rs")
FIGURES = ("busy_s", "idle_s", "update_s")


def build(tree: Path, target: Path) -> Path:
    """The example's program, built in release from a tree of the repository."""
    command = ["cargo", "build", "--quiet", "--release", "--locked", "-p", "tasuki-policy"]
    options = ["--example", EXAMPLE.stem, "--target-dir", str(target)]
    subprocess.run([*command, *options], cwd=tree, check=True)
    return target / "release" / "examples" / EXAMPLE.stem


def time_s(program: Path, workers: list[int]) -> dict[int, dict[str, float]]:
    """The figures that a program measures, for each number of workers."""
    command = [str(program), *map(str, workers)]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    figures = {}
    for count, *seconds in map(str.split, lines):
        figures[int(count)] = dict(zip(FIGURES, map(float, seconds), strict=False))
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", required=True, help="revision to compare with")
    parser.add_argument("--workers", type=int, nargs="+", default=[10, 100, 1000, 10_000])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "before"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", tree, options.before], check=True)
        try:
            programs = {
                "before": build(tree, Path(folder) / "before_target"),
                "now": build(ROOT, Path(folder) / "now_target"),
            }
        finally:
            subprocess.run([*git, "remove", "--force", tree], check=True)
        turns = [
            {name: time_s(program, options.workers) for name, program in programs.items()}
            for _ in range(options.turns)
        ]
    rows = []
    for count in options.workers:
        row: dict[str, float] = {"workers": count}
        for name in programs:
            for figure in turns[0][name][count]:
                times = [turn[name][count][figure] for turn in turns]
                row[f"{name}_{figure}"] = statistics.median(times)
        rows.append(row)
        print(row)
    result = header("placement", label="placement", topology=None, model="")
    revision = ["git", "-C", str(ROOT), "rev-parse", options.before]
    before = subprocess.run(revision, check=True, capture_output=True, text=True).stdout.strip()
    turns_by_count = [{n: {str(c): s for c, s in t.items()} for n, t in x.items()} for x in turns]
    write_result(
        options.output, {**result, "before": before, "rows": rows, "turns": turns_by_count}
    )


if __name__ == "__main__":
    main()
