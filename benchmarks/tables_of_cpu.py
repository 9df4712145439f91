"""The tables of RESULTS.md about engines, drafts and the link between processes on a CPU."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from table_parts import Result, load, number, rows, source


def engines(name: str) -> Callable[[], str]:
    """A table of engines on a CPU: one request, eight, and a prompt if it was measured."""

    def table() -> str:
        result = load(name)
        lines = []
        for engine in result["engines"]:
            one, eight, *prompt = engine["median"].values()
            lines.append(
                [
                    engine["name"],
                    number(one["decode_tok_s"]),
                    number(one["ttft_ms"], 0),
                    number(eight["output_tok_s"]),
                    number(eight["ttft_ms"], 0),
                    number(eight["tpot_ms"]),
                    *(number(scenario["prompt_tok_s"], 0) for scenario in prompt),
                ]
            )
        heads = ["engine", "one: decode tok/s", "TTFT ms"]
        heads += ["eight: output tok/s", "TTFT ms", "TPOT ms"]
        if len(lines[0]) > len(heads):
            heads.append("prompt of 512: tok/s")
        return source(name) + rows(heads, lines)

    return table


def engine_ratios(name: str) -> Callable[[], str]:
    """A table of our best engine against each peer's best; int8 against llama.cpp's Q8_0."""

    def table() -> str:
        result = load(name)
        lines = [
            [scenario, ratio["of"], peer, best["of"], f"{best['ratio']:.2f}x"]
            for scenario, ratio in result["ratios"].items()
            for peer, best in ratio["against"].items()
        ]
        for scenario, ratio in result.get("int8_to_q8_0", {}).items():
            lines.append([scenario, "tasuki int8", "llama.cpp", "Q8_0", f"{ratio:.2f}x"])
        return rows(("requests", "ours", "peer", "its fastest", "ratio"), lines)

    return table


def structured() -> str:
    """A table of what came of the answers to JSON schemas, by collection."""
    result = load("structured_output")
    outcomes = ("valid", "cut off", "invalid", "failed", "not checked", "refused")
    seen = [each for each in outcomes if each in result["outcomes"] or each == "invalid"]
    lines = [
        [name, *(counts.get(each, 0) for each in seen)]
        for name, counts in [*result["collections"].items(), ("all", result["outcomes"])]
    ]
    return source("structured_output") + rows(["collection", *seen], lines)


def engine_floors(name: str) -> Callable[[], str]:
    """A table of our decode rates of one request to what the memory's bandwidth allows."""

    def table() -> str:
        result = load(name)
        read = f"{statistics.median(result['read_bytes_per_s']) / 1e9:.1f}"
        lines = [[engine, read, f"{part:.2f}"] for engine, part in result["of_floor"].items()]
        return rows(("ours, one request", "memory GB/s", "of the floor"), lines)

    return table


def split_on_cpu() -> str:
    """Split and colocated on two cores."""
    result = load("split_vs_colocated")
    keys = ("ttft_ms", "ttst_ms", "itl_ms", "itl_p99_ms", "e2e_ms", "output_tokens_per_s")
    lines = [
        [name, topology, *(number(row[key]) for key in keys)]
        for name, by_topology in result["medians"].items()
        for topology, row in by_topology.items()
    ]
    heads = ("load", "topology", "TTFT", "TTST", "ITL", "ITL p99", "E2E", "output tok/s")
    return source("split_vs_colocated") + rows(heads, lines)


def speculation() -> str:
    """Prompt-lookup drafts on the CPU: medians over the turns."""

    def middle(turns: list[Result], way: str, rate: str) -> str:
        return number(statistics.median(turn[way][rate] for turn in turns))

    lines = [
        [
            name,
            *(middle(each["turns"], way, "tokens_per_s") for way in ("without", "with")),
            f"{each['ratio']:.2f}x",
            f"{each['cpu_ratio']:.2f}x",
            middle(each["turns"], "with", "tokens_per_step"),
        ]
        for name, each in load("speculation")["workloads"].items()
    ]
    heads = ("workload", "tok/s without", "with drafts", "ratio", "by processor time", "tok/step")
    return source("speculation") + rows(heads, lines)


def shaped_link() -> str:
    """KV over links of fixed rates."""
    result = load("shaped_link")
    lines = [
        [
            f"{row['gigabits']:g} Gb/s",
            row["transport"],
            row["way"],
            number(row["bytes_per_s"] * 8e-9, 2),
            number(row["share"], 2),
            number(row["socket_share"], 2),
        ]
        for row in result["rows"]
    ]
    heads = ("link", "transport", "way", "Gb/s", "of the link", "a socket, of the link")
    return source("shaped_link") + rows(heads, lines)


def linkbench() -> str:
    """The link between two processes of one machine."""
    lines, sources = [], []
    for name in (
        "linkbench_cpu",
        "linkbench_cpu_shm",
        "linkbench_cpu_tcp",
        "linkbench_cpu_own_tcp",
    ):
        result = load(name)
        sources.append(source(name))
        rivals = {row["payload_bytes"]: row["bytes_per_s"] for row in result["rivals"]}
        for row in result["rows"]:
            beside, rate = rivals[row["payload_bytes"]], row["bytes_per_s"]
            lines.append(
                [
                    result["way"],
                    f"{row['payload_bytes'] >> 20} MiB",
                    f"{row['block_bytes'] >> 10} KiB",
                    f"{row['descriptors']:,}",
                    number(rate / 1e9, 2),
                    number(1e3 * row["p50_s"], 2),
                    number(1e3 * row["p99_s"], 2),
                    number(1e3 * row["post_p50_s"], 2),
                    number(rate / beside["memcpy"], 2),
                    number(rate / beside["socket"], 2),
                ]
            )
    heads = ("way", "payload", "block", "descriptors", "GB/s", "p50 ms", "p99 ms", "posting ms")
    return "".join(sources) + rows((*heads, "of memcpy", "of a socket"), lines)
