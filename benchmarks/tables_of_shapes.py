"""The tables of RESULTS.md about other models' shapes on a GPU, and about real weights."""

from __future__ import annotations

from collections.abc import Callable

from table_parts import load, number, rows, source

_STEPS = ("gpu_steps_llama-3-8b", "gpu_steps_llama-3.2-1b")


def shapes() -> str:
    """Single steps of other shapes: the fastest variant of each, beside its floor."""
    lines = []
    for name in _STEPS:
        result = load(name)
        shape = name.removeprefix("gpu_steps_")
        for step, floor_ms in result["floor_ms"].items():
            found = [row for row in result["steps"] if row["step"] == step]
            best = min(found, key=lambda row: float(row["ms"]))
            lines.append(
                [
                    shape,
                    step,
                    best["variant"],
                    number(best["ms"], 2),
                    number(floor_ms, 2),
                    f"{floor_ms / best['ms']:.0%}",
                ]
            )
    heads = ("shape", "step", "fastest variant", "ms", "floor ms", "of the floor")
    return "".join(map(source, _STEPS)) + rows(heads, lines)


def shape_load(shape: str) -> str:
    """One engine under W1 and W2 in another shape."""
    name = f"gpu_load_{shape}"
    keys = ("output_tok_s", "total_tok_s", "ttft_mean_ms", "ttft_p99_ms")
    times = ("itl_mean_ms", "itl_p99_ms", "second_p99_ms")
    lines = [
        [
            run["workload"],
            *(number(run["figures"][key], 0) for key in keys),
            *(number(run["figures"][key]) for key in times),
            f"{run['trace']['busy']:.1%}",
        ]
        for run in load(name)["runs"]
    ]
    heads = ("workload", "output tok/s", "total tok/s", "TTFT mean ms", "TTFT p99")
    heads += ("ITL mean", "ITL p99", "TTST - TTFT p99", "GPU busy")
    return source(name) + rows(heads, lines)


def gpu_start(name: str) -> Callable[[], str]:
    """What a start from real weights takes, its files cached and, if it was measured, not."""

    def table() -> str:
        result = load(name)
        starts = [result["median_s"]] + ([result["cold_s"]] if "cold_s" in result else [])
        lines = [[part, *(number(took[part], 2) for took in starts)] for part in starts[0]]
        heads = ("part", "cached, s", "not cached, s")
        return source(name) + rows(heads[: 1 + len(starts)], lines)

    return table


def fp8_steps() -> str:
    """Decode steps with fp8 weights and caches beside bfloat16, and a layer's GEMMs."""
    result = load("gpu_fp8")
    ms = {(step["step"], step["rows"], step["context"]): step["ms"] for step in result["steps"]}
    sizes = sorted({(n, context) for _, n, context in ms}, key=lambda size: (size[1], size[0]))
    names = dict.fromkeys(name for name, *_ in ms)
    lines = [[name, *(number(ms[name, *size], 2) for size in sizes)] for name in names]
    heads = ["step, ms", *(f"{count} rows at {context:,}" for count, context in sizes)]
    us: dict[tuple[str, int], float] = {}
    for each in result["gemms"]:
        key = each["way"], each["rows"]
        us[key] = us.get(key, 0.0) + each["us"]
    counts = sorted({count for _, count in us})
    ways = dict.fromkeys(way for way, _ in us)
    gemms = [
        [way, *(number(us[way, n], 0) if (way, n) in us else "" for n in counts)] for way in ways
    ]
    wide = ["a layer's four GEMMs, microseconds", *(f"{count:,} rows" for count in counts)]
    return source("gpu_fp8") + rows(heads, lines) + "\n\n" + rows(wide, gemms)
