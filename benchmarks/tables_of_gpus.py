"""The tables of RESULTS.md about serving on several GPUs, and about KV between two of them."""

from __future__ import annotations

from collections.abc import Callable

from table_parts import load, number, rows, source

_SERVED = (
    ("output_throughput", "output tok/s", 0),
    ("total_throughput", "total tok/s", 0),
    ("ttft_mean_ms", "TTFT mean ms", 0),
    ("ttft_p99_ms", "TTFT p99", 0),
    ("tpot_mean_ms", "TPOT mean", 1),
    ("itl_p99_ms", "ITL p99", 1),
    ("second_gap_p99_ms", "TTST - TTFT p99", 1),
)


def served(*names: str) -> Callable[[], str]:
    """W1 and W2 from files of `serve_w1_w2.py`."""

    def table() -> str:
        lines = []
        for name in names:
            result = load(name)
            revision = str(result["git_revision"])[:7]
            for workload, by_topology in result["medians"].items():
                for topology, row in by_topology.items():
                    cells = [number(row.get(key), digits) for key, _, digits in _SERVED]
                    lines.append([workload, topology, revision, *cells])
        lines.sort(key=lambda line: str(line[0]))
        heads = ("workload", "topology", "revision", *(title for _, title, _ in _SERVED))
        return "".join(map(source, names)) + rows(heads, lines)

    return table


def role_names() -> str:
    """Two workers under every way of naming their roles, from `role_names.py`."""
    result = load("role_names")
    lines = []
    for workload, by_name in result["summary"].items():
        for name, row in by_name.items():
            rates = [
                run["output_throughput"]
                for run in result["runs"]
                if (run["workload"], run["naming"]) == (workload, name)
            ]
            cells = [
                number(value, 0) for value in (row["output_tokens_per_s"], min(rates), max(rates))
            ]
            lines.append([workload, name, len(rates), *cells, number(row["of_best"], 3)])
    heads = ("workload", "named", "runs", "output tok/s", "least", "most", "of the best")
    return source("role_names") + rows(heads, lines)


def peers() -> str:
    """vLLM and Tasuki in one lease."""
    result = load("peers_2xh200")
    lines = [
        [
            run["workload"],
            run["system"],
            number(run["output_tok_s"], 0),
            number(run["total_tok_s"], 0),
            number(run["ttft_ms"]["mean"], 0),
            number(run["ttft_ms"]["p99"], 0),
            number(run["tpot_ms"]["mean"]),
            number(run["itl_p99_ms"]),
            number(run["ttst_minus_ttft_ms"]["p99"]),
        ]
        for run in result["runs"]
        if "moe" not in run["system"]
    ]
    lines.sort(key=lambda line: str(line[0]))
    heads = ("workload", "system", *(title for _, title, _ in _SERVED))
    return f"{result['what']}\n\n" + rows(heads, lines)


def tensor_parallel() -> str:
    """Decode steps on several GPUs."""
    lines = []
    names = ("gpu_tensor_parallel", "gpu_tensor_parallel_4")
    for name in names:
        for run in load(name)["runs"]:
            for key, how in (("steps", "symmetric memory"), ("steps_nccl", "NCCL only")):
                lines += [
                    [row["batch"], run["ranks"], how if run["ranks"] > 1 else "", number(ms, 2)]
                    for row in run.get(key) or []
                    if not row["gathered"] and (ms := row["step_ms"])
                ]
    lines.sort(key=lambda line: (int(str(line[0])), int(str(line[1]))))
    return "".join(map(source, names)) + rows(("batch", "GPUs", "sums by", "step ms"), lines)


def handoff(name: str) -> Callable[[], str]:
    """KV over NVLink, from one result file; with digests where it has them."""

    def table() -> str:
        found = [
            row
            for run in load(name)["runs"]
            if run["ucx_cuda_ipc_cache"] == "n"
            for row in run.get("rows", [])
        ]
        heads = ["block size", "pool", "tokens", "GB/s", "descriptors", "posting ms", "total ms"]
        columns = [("gb_per_s", 0), ("descriptors", 0), ("post_ms", 2), ("total_ms", 2)]
        if "checked_ms" in found[0]:
            heads += ["with digests ms", "digests alone ms"]
            columns += [("checked_ms", 2), ("digests_ms", 2)]
        lines = [
            [row["block_size"], row["state"], row["tokens"]]
            + [number(row[key], digits) for key, digits in columns]
            for row in found
        ]
        return source(name) + rows(heads, lines)

    return table
