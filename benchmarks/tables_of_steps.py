"""The tables of RESULTS.md about single steps on a GPU."""

from __future__ import annotations

from collections.abc import Callable

from table_parts import Result, load, number, rows, source


def steps() -> str:
    """Decode steps, in CUDA graphs and without."""
    result = load("gpu_steps")
    by_step: dict[str, dict[str, float]] = {}
    for row in result["steps"]:
        by_step.setdefault(row["step"], {})[row["variant"]] = row["ms"]
    lines = [
        [step, number(found.get("graph"), 2), number(found.get("no graph"), 2)]
        for step, found in by_step.items()
    ]
    floors = result["floors"]
    copied = (
        f"\n\nA copy runs at {floors['copy_gb_s']:,.0f} GB/s (bytes read and written), a bfloat16"
    )
    copied += f" GEMM at {floors['product_tflops']:,.0f} TFLOP/s on the same GPU."
    return source("gpu_steps") + rows(("step", "ms in a CUDA graph", "ms without"), lines) + copied


def revisions(name: str) -> Callable[[], str]:
    """Decode steps of several revisions in turns, from one result file."""

    def table() -> str:
        result = load(name)
        of_tree = {tree: head.split()[0] for tree, head in result["trees"].items()}
        ms: dict[int, list[str]] = {}
        for row in result["steps"]:
            ms.setdefault(row["rows"], []).append(number(row["ms"], 3))
        heads = ("batch", *(f"{revision}: step ms" for revision in of_tree.values()))
        return source(name) + rows(heads, [[batch, *found] for batch, found in ms.items()])

    return table


def sampled() -> str:
    """What sampling adds to a step of 96."""
    found = {row["name"]: row for row in load("gpu_sampled_steps")["steps"]}
    greedy = found["batch 96, context 770, greedy; overlapped, graphs"]["ms"]
    lines = [
        [name, number(row["ms"], 2), f"{row['ms'] / greedy - 1:+.1%}", number(row["host_ms"], 2)]
        for name, row in found.items()
        if "overlapped, graphs" in name
    ]
    heads = ("steady decode", "ms a step", "against greedy", "host ms")
    return source("gpu_sampled_steps") + rows(heads, lines)


def dispatch() -> str:
    """Decode steps by the default and by the measured choice of GEMMs."""
    lines = [
        [row["rows"], number(default, 3), number(measured, 3), f"{measured / default - 1:+.1%}"]
        for row in load("gpu_dispatch")["steps"]
        for default, measured in [(row["ms"]["default"], row["ms"]["measured"])]
    ]
    heads = ("batch", "default ms", "measured ms", "difference")
    return source("gpu_dispatch") + rows(heads, lines)


def fallback() -> str:
    """The compiled transformers model against the fast path."""
    by_step: dict[str, dict[str, float]] = {}
    for row in load("gpu_fallback")["steps"]:
        by_step.setdefault(row["step"], {})[row["variant"]] = row["ms"]
    lines = []
    for step, found in by_step.items():
        fast, compiled = found["fast path"], found["compiled fallback"]
        lines.append([step, number(fast, 2), number(compiled, 2), f"{compiled / fast:.2f}x"])
    heads = ("step", "fast path ms", "compiled ms", "ratio")
    return source("gpu_fallback") + rows(heads, lines)


def busy() -> str:
    """How much of the time the GPU computes."""
    lines = [
        [row["name"], number(row["ms"], 2), number(row["host_ms"], 2), f"{trace['busy']:.1%}"]
        for row in load("gpu_busy")["steps"]
        if (trace := row.get("trace"))
    ]
    return source("gpu_busy") + rows(("steady decode", "ms a step", "host ms", "GPU busy"), lines)


def mixed_steps() -> str:
    """Steps with prompts, in CUDA graphs and without."""
    by_step: dict[str, dict[bool, Result]] = {}
    for row in load("gpu_mixed_steps")["steps"]:
        by_step.setdefault(row["step"], {})[row["graph"]] = row
    lines = [
        [step, *(number(found[graph][key], 2) for key in ("gpu_ms", "host_ms") for graph in both)]
        for step, found in by_step.items()
        if len(both := (True, False)) == len(found)
    ]
    heads = ("step", "GPU ms, graph", "GPU ms, none", "host ms, graph", "host ms, none")
    return source("gpu_mixed_steps") + rows(heads, lines)
