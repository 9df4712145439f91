"""Fills the tables of RESULTS.md from the result files.

    python benchmarks/tables.py            write them
    python benchmarks/tables.py --check    fail if RESULTS.md differs from what the files say

A table stands between `<!-- table: NAME -->` and `<!-- end -->` and begins with the command,
revision and machine of the file that it comes from. `make lint` runs the check.
"""

from __future__ import annotations

import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

from table_parts import Result, load, number, rows, source
from tables_of_doctor import doctor
from tables_of_roles import roles
from tables_of_router import fuzz, overload, placement, router, router_vs_peers
from tables_of_shapes import fp8_steps, gpu_start, shape_load, shapes
from tables_of_simulator import simulator, simulator_accuracy

PAGE = Path(__file__).resolve().parent / "RESULTS.md"
_MARKED = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.S)


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


def revisions() -> str:
    """Decode steps of two revisions in turns."""
    result = load("gpu_revisions")
    lines = [
        [row["rows"], result["trees"][row["tree"]].split()[0], number(row["ms"], 3)]
        for row in result["steps"]
    ]
    return source("gpu_revisions") + rows(("batch", "revision", "step ms"), lines)


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


def handoff() -> str:
    """KV over NVLink."""
    lines = [
        [
            row["block_size"],
            row["state"],
            row["tokens"],
            number(row["gb_per_s"], 0),
            number(row["descriptors"], 0),
            number(row["post_ms"], 2),
            number(row["total_ms"], 2),
        ]
        for run in load("handoff_nvlink")["runs"]
        if run["ucx_cuda_ipc_cache"] == "n"
        for row in run.get("rows", [])
    ]
    heads = ("block size", "pool", "tokens", "GB/s", "descriptors", "posting ms", "total ms")
    return source("handoff_nvlink") + rows(heads, lines)


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


def linkbench() -> str:
    """The link between two processes of one machine."""
    lines, sources = [], []
    for name in ("linkbench_cpu", "linkbench_cpu_tcp"):
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


TABLES: dict[str, Callable[[], str]] = {
    "engines": engines("engine_vs_peers"),
    "engine-ratios": engine_ratios("engine_vs_peers"),
    "engines-avx2": engines("engine_vs_peers_avx2"),
    "engine-ratios-avx2": engine_ratios("engine_vs_peers_avx2"),
    "engine-floors-avx2": engine_floors("engine_vs_peers_avx2"),
    "split-on-cpu": split_on_cpu,
    "router": router,
    "placement": placement,
    "doctor": doctor,
    "simulator": simulator,
    "simulator-accuracy": simulator_accuracy,
    "roles-follow": roles,
    "overload": overload,
    "fuzz": fuzz,
    "router_vs_peers": router_vs_peers,
    "clients": clients,
    "clients-on-server": clients_on_server,
    "speculation": speculation,
    "served": served("serve_split_strict", "serve_w1_w2", "serve_mixed_and_decode", "serve_roles"),
    "peers": peers,
    "steps": steps,
    "revisions": revisions,
    "sampled": sampled,
    "dispatch": dispatch,
    "tensor-parallel": tensor_parallel,
    "fallback": fallback,
    "busy": busy,
    "mixed-steps": mixed_steps,
    "handoff": handoff,
    "linkbench": linkbench,
    "shapes": shapes,
    "shape-load": lambda: shape_load("llama-3-8b"),
    "expert-load": lambda: shape_load("qwen3-30b-a3b"),
    "fp8": fp8_steps,
    "gpu-start": gpu_start,
}


def filled(page: str) -> str:
    """The page with all its tables made anew.

    Raises:
        KeyError: It has a mark that no table belongs to.
    """
    return _MARKED.sub(lambda mark: f"{mark[1]}{TABLES[mark[2]]()}\n{mark[3]}", page)


def main() -> int:
    """Fill or check RESULTS.md."""
    page = PAGE.read_text()
    made = filled(page)
    if "--check" not in sys.argv:
        PAGE.write_text(made)
    elif made != page:
        print("benchmarks/RESULTS.md differs from the files: run benchmarks/tables.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
