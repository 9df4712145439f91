"""The tables of RESULTS.md about the router: its costs, placement, overload."""

from __future__ import annotations

from collections.abc import Callable

from table_parts import load, number, rows, source


def router() -> str:
    """What the router costs: processor time, latency, memory."""
    result = load("router")
    found = {(row["what"], row["router"], row["setup"]): row for row in result["medians"]}
    direct = found["latency", "none", "direct"]
    lines = []
    for what, name, setup in found:
        if what == "cost":
            latency, memory = found["latency", name, setup], found.get(("memory", name, setup), {})
            added = [latency[key] - direct[key] for key in ("ttft_p50_ms", "ttft_p99_ms")]
            cost = number(found[what, name, setup]["tokens_per_cpu_s"], 0)
            kib = memory.get("bytes_per_stream")
            held = "" if kib is None else number(kib / 1024)
            lines.append([name, setup, cost, *(number(value, 2) for value in added), held])
    heads = (
        "router",
        "answers",
        "tokens per CPU-second",
        "added TTFT p50 ms",
        "p99",
        "KiB a stream",
    )
    return source("router") + rows(heads, lines)


def fuzz() -> str:
    """Cases of each fuzzing target."""
    result = load("fuzz")
    lines = [
        [
            target["target"],
            f"{target['cases']:,}",
            target["seed"],
            number(target["seconds"], 0),
            number(target["peak_resident_bytes"] / 1e6, 0),
        ]
        for target in result["targets"]
    ]
    lines.append(["all", f"{result['cases']:,}", "", "", ""])
    return source("fuzz") + rows(("target", "cases", "first seed", "s", "peak memory, MB"), lines)


def router_vs_peers(name: str) -> Callable[[], str]:
    """The router and peers before the same HTTP workers, by the file of that name."""

    def table() -> str:
        result = load(name)
        named: dict[tuple[str, str], dict[tuple[str, ...], dict[str, float]]] = {}
        for row in result["medians"]:
            key = (row["what"], *(str(row[part]) for part in ("prompt", "clients") if part in row))
            named.setdefault((row["router"], row["engine"]), {})[key] = row
        direct = named.pop(("direct", "vllm"))["latency",]
        sizes = ("1.5 KB", "16 KB")
        costs = [("cost", size, at_once) for size in sizes for at_once in ("32", "128")]
        lines = []
        for (program, engine), found in named.items():
            added = [found["latency",][key] - direct[key] for key in ("ttft_p50_ms", "ttft_p99_ms")]
            highest = found.get(("memory",), {}).get("highest_mb")
            paced = found.get(("paced",), {}).get("requests_per_cpu_s")  # not in files of before
            lines.append(
                [
                    program,
                    engine,
                    *(number(found[cost]["requests_per_cpu_s"], 0) for cost in costs),
                    number(paced, 0),
                    *(number(value, 2) for value in added),
                    number(highest, 0),
                ]
            )
        heads = (
            "router",
            "workers",
            "requests per CPU-second, 1.5 KB, 32 clients",
            "128",
            "16 KB, 32",
            "128",
            "1.5 KB, 128, paced",
            f"added TTFT p50 ms at {result['rate']:.0f}/s",
            "p99",
            f"MB, {result['streams']:,} streams",
        )
        return source(name) + rows(heads, lines)

    return table


def placement() -> str:
    """How long the policy takes to place a request."""
    result = load("placement")
    figures = ("before_busy_s", "now_busy_s", "now_idle_s", "now_update_s")
    lines = [
        [f"{row['workers']:,}", *(number(row[figure] * 1e6, 2) for figure in figures)]
        for row in result["rows"]
    ]
    heads = (
        "workers",
        f"placement µs, {result['before'][:7]}",
        "now, random loads",
        "now, all idle",
        "of which the update",
    )
    return source("placement") + rows(heads, lines)


def overload() -> str:
    """Goodput at twice the load that a fleet takes."""
    return "\n\n".join(_overload(name) for name in ("overload", "overload_gpu", "overload_2gpus"))


def _overload(file: str) -> str:
    result = load(file)
    best = result["search"]["rate"]
    lines = [["best rate, without admission", number(best), number(best), "", "", "", ""]]
    for name in ("without", "with"):
        run = result[name]
        refused = run["refused_after_s"] or {}
        lines.append(
            [
                f"twice that, {name} admission",
                number(run["requests"] / run["seconds"]),
                number(run["goodput"]),
                number(run["ttft_ms"]["median"], 0),
                number(run["tpot_ms"]["median"]),
                number(100 * run["refused"] / run["requests"], 0),
                number(1e3 * refused["p50"], 0) if refused else "",
            ]
        )
    heads = (
        "load",
        "requests/s",
        "goodput/s",
        "TTFT p50 ms",
        "TPOT p50 ms",
        "refused %",
        "after ms",
    )
    return source(file) + rows(heads, lines)
