"""How long the policy takes to place a request, by number of workers; two revisions by turns.

    python benchmarks/placement.py --before REVISION --output benchmarks/results/placement.json

A third of the workers each prefill, decode and mixed, one domain, loads that differ. Each
revision runs its own `crates/policy/examples/placement_time.rs`; one that has none gets this
tree's, which compiles where a worker has the same fields (before 896d795: at that revision).
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import tempfile
from pathlib import Path

from tasuki.bench.header import header, write_result

ROOT = Path(__file__).parents[1]
EXAMPLE = Path("crates/policy/examples/placement_time.rs")


def build(tree: Path, target: Path) -> Path:
    """The example's program, built in release from a tree of the repository."""
    command = ["cargo", "build", "--quiet", "--release", "--locked", "-p", "tasuki-policy"]
    options = ["--example", EXAMPLE.stem, "--target-dir", str(target)]
    subprocess.run([*command, *options], cwd=tree, check=True)
    return target / "release" / "examples" / EXAMPLE.stem


def time_s(program: Path, workers: list[int]) -> dict[int, float]:
    """Median seconds of one placement for each number of workers."""
    command = [str(program), *map(str, workers)]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return {int(count): float(seconds) for count, seconds in map(str.split, lines)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", required=True, help="revision to compare with")
    parser.add_argument("--workers", type=int, nargs="+", default=[10, 100, 1000, 10_000])
    parser.add_argument("--most-before", type=int, default=1000, help="workers it is given at most")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "before"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", tree, options.before], check=True)
        try:
            if not (tree / EXAMPLE).exists():
                (tree / EXAMPLE).parent.mkdir(exist_ok=True)
                shutil.copy(ROOT / EXAMPLE, tree / EXAMPLE)
            programs = {
                "before": build(tree, Path(folder) / "before_target"),
                "now": build(ROOT, Path(folder) / "now_target"),
            }
        finally:
            subprocess.run([*git, "remove", "--force", tree], check=True)
        fewer = [count for count in options.workers if count <= options.most_before]
        given = {"before": fewer, "now": options.workers}
        turns = [
            {name: time_s(program, given[name]) for name, program in programs.items()}
            for _ in range(options.turns)
        ]
    rows = []
    for count in options.workers:
        row: dict[str, float | None] = {"workers": count}
        for name in programs:
            times = [turn[name][count] for turn in turns if count in turn[name]]
            row[f"{name}_s"] = statistics.median(times) if times else None
        rows.append(row)
        print({key: value for key, value in row.items() if value is not None})
    result = header("placement", label="placement", topology=None, model="")
    revision = ["git", "-C", str(ROOT), "rev-parse", options.before]
    before = subprocess.run(revision, check=True, capture_output=True, text=True).stdout.strip()
    turns_by_count = [{n: {str(c): s for c, s in t.items()} for n, t in x.items()} for x in turns]
    write_result(
        options.output, {**result, "before": before, "rows": rows, "turns": turns_by_count}
    )


if __name__ == "__main__":
    main()
