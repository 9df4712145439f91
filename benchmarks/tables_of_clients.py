"""The tables of RESULTS.md about load generators."""

from __future__ import annotations

import statistics

from table_parts import load, number, rows, source


def clients() -> str:
    """Load generators: what a token costs the client, and what each reports."""
    result = load("client_vs_peers")
    own = statistics.median(result["tokens_per_cpu_s"]["tasuki bench serve"])
    lines = []
    for name, costs in result["tokens_per_cpu_s"].items():
        cost = statistics.median(costs)
        seen = result["agreement"][name]
        middle = [
            statistics.median(each[key] for each in seen)
            for key in ("output_throughput", "ttft_ms", "tpot_ms")
        ]
        ratio = "" if cost == own else f"{own / cost:.1f}x"
        lines.append([name, number(cost, 0), ratio, *(number(value, 2) for value in middle)])
    heads = ("client", "tokens per CPU-second", "ours / its", "output tok/s", "TTFT ms", "TPOT ms")
    return source("client_vs_peers") + rows(heads, lines)


def clients_on_server() -> str:
    """Differences between load generators on one real server."""
    result = load("clients_on_a_real_server")
    lines = []
    for peer, figures in result["ours_minus_its"].items():
        for figure, interval in figures.items():
            span = f"{interval['low']:+.2f} to {interval['high']:+.2f}"
            inside = "yes" if interval["holds_zero"] else "no"
            lines.append([peer, figure, f"{interval['difference']:+.2f}", span, inside])
    heads = ("client", "figure", "ours - its", "95% interval", "0 inside")
    return source("clients_on_a_real_server") + rows(heads, lines)
