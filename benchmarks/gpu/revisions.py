"""Decode steps of several revisions of Tasuki in turn on one GPU.

    python benchmarks/gpu/revisions.py a916299 HEAD --batches 2 4 8 16 --context 850
    python benchmarks/gpu/revisions.py HEAD mine=.          a tree that is there, as it is
    python benchmarks/gpu/revisions.py a916299 HEAD --quantization fp8     weights of fp8
    python benchmarks/gpu/revisions.py HEAD mine=. --device cpu --tiny   the same code anywhere

A revision is unpacked into a temporary folder, with the installed extension. Each
tree is a process that holds a model in the shape of Qwen3-4B, or another, with random weights,
the same ones in all, and a cache; steps are CUDA graphs, built and timed by the
tree's own `step_bench.py`. Logits are compared first: `error` is their distance
from those of cuBLAS with kernels between (the first tree's own is the scale of it; of weights of
fp8 from the tree's own way without graphs),
`differs` that from the first tree's, both relative, `other tokens` the rows whose
greedy choice differs from the first tree's, `same` the replays that left the same
bits. Then the trees take turns, so that what the GPU's clock does meets all alike.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from shapes import add_shape_option, config_of, result_file
from tree_process import TreeFailedError, TreeProcess

from tasuki.bench.header import header, own_command, write_result

REPOSITORY = Path(__file__).resolve().parents[2]
REPLAYS = 8

Array = npt.NDArray[np.float32]


def unpack(revision: str, folder: Path) -> str:
    """Put a revision's sources and the installed extension into `folder`; says which it is."""
    parts = ("python", "benchmarks/gpu")
    archive = _git("archive", "--format=tar", revision, *parts)
    with tarfile.open(fileobj=io.BytesIO(archive)) as packed:
        packed.extractall(folder, filter="data")
    extension = importlib.util.find_spec("tasuki._native")
    if extension is None or extension.origin is None:
        raise SystemExit("tasuki._native is not installed: build it by tools/build_native.sh")
    shutil.copy(extension.origin, folder / "python" / "tasuki")
    return _git("log", "-1", "--format=%h %s", revision, "--").decode().strip()


def _git(*arguments: str) -> bytes:
    done = subprocess.run(["git", *arguments], cwd=REPOSITORY, capture_output=True)
    if done.returncode != 0:
        raise SystemExit(f"git {' '.join(arguments)}: {done.stderr.decode().strip()}")
    return done.stdout


class Comparison:
    """The trees, the first one what the others are compared with, and what was found."""

    def __init__(self, trees: list[TreeProcess], batches: list[int]) -> None:
        self._trees, self._batches = trees, batches
        self.checks: list[dict[str, Any]] = []
        self.steps: list[dict[str, Any]] = []
        self.failed: list[dict[str, Any]] = []

    def run(self, rounds: int, repeats: int) -> None:
        """Prepare side by side, compare logits, then time in turns."""
        for tree in self._trees:
            for rows in self._batches:
                tree.ask("prepare", rows)
        for tree in self._trees:
            for rows in self._batches:
                with self._noting(tree, "prepare", rows):
                    tree.answer()
        for rows in self._batches:
            self._check(rows)
        times: dict[tuple[int, str], list[float]] = {
            (rows, tree.name): [] for rows in self._batches for tree in self._trees
        }
        for _ in range(rounds):
            for rows in self._batches:
                for tree in self._ready(rows):
                    with self._noting(tree, "ms", rows):
                        times[rows, tree.name].append(tree.do("ms", rows, repeats))
        self.steps = [
            {"rows": rows, "tree": name, "ms": statistics.median(each), "runs_ms": each}
            for (rows, name), each in times.items()
            if each
        ]

    def _ready(self, rows: int) -> Iterable[TreeProcess]:
        """The trees that have not failed at this batch."""
        failed = {(each["tree"], each["rows"]) for each in self.failed}
        return [tree for tree in self._trees if (tree.name, rows) not in failed]

    @contextmanager
    def _noting(self, tree: TreeProcess, what: str, rows: int) -> Iterator[None]:
        try:
            yield
        except TreeFailedError as error:
            last = str(error).splitlines()[-1]  # what is above it has paths of this machine
            self.failed.append({"tree": tree.name, "rows": rows, "at": what, "error": last})
            print(f"FAILED: {tree.name}, {what} {rows}: {error}", file=sys.stderr, flush=True)

    def _check(self, rows: int) -> None:
        base = None
        for tree in self._ready(rows):
            with self._noting(tree, "logits", rows):
                answer = tree.do("logits", rows, REPLAYS)
                found = answer["logits"]
                base = found if base is None else base
                check = {
                    "rows": rows,
                    "tree": tree.name,
                    "error": distance(found, answer["exact"]),
                    "differs": distance(found, base),
                    "other_tokens": int((found.argmax(-1) != base.argmax(-1)).sum()),
                    "same_replays": answer["same_replays"],
                    "finite": bool(np.isfinite(found).all()),
                }
                self.checks.append(check)
                print(check_line(check), file=sys.stderr, flush=True)


def distance(found: Array, wanted: Array | None) -> float | None:
    """Relative, by the Euclidean norm; None: nothing to compare with, or not finite."""
    if wanted is None:
        return None
    far = float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))
    return far if np.isfinite(far) else None


def check_line(check: dict[str, Any]) -> str:
    """A row of the logits' table, with its flaws."""
    error, differs = (
        "none   " if check[name] is None else f"{check[name]:.1e}" for name in ("error", "differs")
    )
    flaws = "" if check["same_replays"] == REPLAYS else "  <-- NOT THE SAME EVERY TIME"
    flaws += "" if check["finite"] else "  <-- NOT FINITE"
    return (
        f"logits {check['rows']:3} {check['tree']:10} error {error} differs {differs}"
        f" other tokens {check['other_tokens']:2} same {check['same_replays']}/{REPLAYS}{flaws}"
    )


def report(result: dict[str, Any]) -> str:
    """The tables: logits, then for each batch medians, the distance from the first, the range."""
    lines = [check_line(check) for check in result["checks"]]
    for rows in dict.fromkeys(step["rows"] for step in result["steps"]):
        steps = [step for step in result["steps"] if step["rows"] == rows]
        each = [
            f"{step['tree']} {step['ms']:.3f} ms ({1e3 * (step['ms'] - steps[0]['ms']):+.0f} us;"
            f" range {1e3 * (max(step['runs_ms']) - min(step['runs_ms'])):.0f})"
            for step in steps
        ]
        lines.append(f"STEP {rows:3}: " + "  ".join(each))
    lines += [f"FAILED: {each['tree']}, {each['at']} {each['rows']}" for each in result["failed"]]
    return "\n".join(lines)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Unpack the trees, start them, compare; gives the result's own fields."""
    settings = {
        "device": args.device,
        "config": config_of(args.shape, args.tiny),
        "context_tokens": args.context,
        "most_rows": max(args.batches),
        "quantization": args.quantization,
    }
    meanings: dict[str, str] = {}
    trees: list[TreeProcess] = []
    with ExitStack() as stack:
        room = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for index, word in enumerate(args.trees):
            name, is_folder, place = word.partition("=")
            folder = Path(place) if is_folder else room / f"tree_{index}"
            meanings[name] = "a folder" if is_folder else unpack(name, folder)
            log = room / f"{index}.log"
            trees.append(stack.enter_context(TreeProcess(name, folder, settings, log)))
        comparison = Comparison(trees, args.batches)
        comparison.run(args.rounds, args.repeats)
    return {
        "trees": meanings,
        "context_tokens": args.context,
        "quantization": args.quantization,
        "replays": REPLAYS,
        "rounds": args.rounds,
        "repeats": args.repeats,
        "checks": comparison.checks,
        "steps": comparison.steps,
        "failed": comparison.failed,
    }


def main() -> None:
    """Measure, write the result file, print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("trees", nargs="+", help="revisions, or NAME=FOLDER")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 16, 32, 50, 64, 96])
    parser.add_argument("--context", type=int, default=850, help="tokens of each sequence")
    parser.add_argument("--rounds", type=int, default=6, help="turns of each tree")
    parser.add_argument("--repeats", type=int, default=24, help="steps in a turn, on CUDA")
    parser.add_argument("--quantization", choices=("none", "fp8"), default="none")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the script")
    add_shape_option(parser)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    names = [word.partition("=")[0] for word in args.trees]
    if len(set(names)) < len(names):
        parser.error(f"names must differ: {' '.join(names)}; NAME=FOLDER gives one")
    command = [
        f"{word.partition('=')[0]}=FOLDER" if word in args.trees and "=" in word else word
        for word in own_command()
    ]
    described = header(
        "gpu_revisions",
        command=command,
        label="revisions",
        topology=None,
        model=f"{args.shape} shape",
    )
    result = described | measure(args)
    write_result(args.output or result_file("gpu_revisions", args.shape), result)
    print(report(result))
    if result["failed"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
