"""Result files after the schema "tasuki.bench/1", from a small queueing model with a seed.

Each prefill worker reads prompts one after the other; each decode worker's step
grows with the answers it writes. Mixed workers do both, so that prompts delay
answers. The metrics are reckoned here, from the same times, by their definitions.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

PREFILL_S_PER_TOKEN = 0.0004
STEP_S = 0.008
STEP_S_PER_REQUEST = 0.0012
TRANSFER_S = 0.012
SLO = {"ttft_s": 1.0, "tpot_s": 0.03}


def stats(values: list[float]) -> dict[str, float | None]:
    """Statistics of milliseconds, as in the schema."""
    names = ("mean", "median", "std", "min", "max", "p90", "p95", "p99")
    if not values:
        return dict.fromkeys(names)
    data = np.array(values)
    found = [data.mean(), np.median(data), data.std(), data.min(), data.max()]
    found += list(np.percentile(data, (90, 95, 99)))
    return {name: float(value) for name, value in zip(names, found, strict=True)}


def requests(
    prefill: int, decode: int, mixed: int, rate: float, count: int, seed: int
) -> dict[str, Any]:
    """The "requests" block: what each request met."""
    random = np.random.default_rng(seed)
    due = np.cumsum(random.exponential(1 / rate, count))
    inputs, outputs = random.integers(256, 769, count), random.integers(32, 97, count)
    free = [0.0] * (prefill + mixed)
    ends: list[list[float]] = [[] for _ in range(decode + mixed)]
    columns: dict[str, list[Any]] = {
        key: []
        for key in (
            *("due_s", "sent_s", "first_s", "second_s", "end_s", "input_tokens"),
            *("output_tokens", "error", "in_window", "chunk_s", "chunk_tokens"),
        )
    }
    phases: dict[str, list[float]] = {
        f"{name}_ms": []
        for name in (
            *("queue", "prefill", "first_token", "handshake", "transfer"),
            *("transfer_exposed", "first_decode", "messages", "decode", "total"),
        )
    }
    for i in range(count):
        worker = int(np.argmin(free))
        sent = due[i] + 0.0002
        begin = max(sent, free[worker])
        ready = begin + inputs[i] * PREFILL_S_PER_TOKEN
        free[worker] = ready
        first = ready + 0.002
        split = not mixed
        place = worker if mixed else int(np.argmin([len(e) for e in ends]))
        ends[place] = [end for end in ends[place] if end > first]
        step = STEP_S + STEP_S_PER_REQUEST * len(ends[place])
        if mixed:  # a share of the steps carries somebody's prompt
            step *= 1 + min(2.5, rate / mixed * 512 * PREFILL_S_PER_TOKEN * 1.4)
        exposed = TRANSFER_S if split else 0.0
        gaps = step * random.uniform(0.9, 1.2, outputs[i] - 1)
        chunks = first + np.concatenate([[0.0], exposed + np.cumsum(gaps)])
        ends[place].append(float(chunks[-1]))
        values = (
            *(due[i], sent, first, chunks[1], chunks[-1], int(inputs[i])),
            *(int(outputs[i]), None, i >= count // 20),
        )
        for key, value in zip(columns, values, strict=False):
            columns[key].append(value)
        columns["chunk_s"].append([round(float(c), 6) for c in chunks])
        columns["chunk_tokens"].append([1] * len(chunks))
        account = (
            *(begin - sent, ready - begin, first - sent, 0.001 * split, 0.03 * split),
            *(exposed, gaps[0], 0.0, chunks[-1] - chunks[1], chunks[-1] - sent),
        )
        for key, value in zip(phases, account, strict=True):
            phases[key].append(float(value) * 1e3)
    return {**columns, "phases": phases}


def serve_result(
    name: str, prefill: int, decode: int, mixed: int, rate: float, count: int = 120, seed: int = 0
) -> dict[str, Any]:
    """A whole file of kind "serve"."""
    block = requests(prefill, decode, mixed, rate, count, seed)
    inside = [i for i in range(count) if block["in_window"][i]]
    columns = {key: [block[key][i] for i in inside] for key in block if key != "phases"}
    begin, end = columns["due_s"][0], max(columns["end_s"])
    duration = end - begin
    ttft = [f - d for f, d in zip(columns["first_s"], columns["due_s"], strict=True)]
    ttst = [s - d for s, d in zip(columns["second_s"], columns["due_s"], strict=True)]
    e2e = [e - d for e, d in zip(columns["end_s"], columns["due_s"], strict=True)]
    tpot = [
        (e - f) / (n - 1)
        for e, f, n in zip(
            columns["end_s"], columns["first_s"], columns["output_tokens"], strict=True
        )
    ]
    gaps = [float(gap) for chunk in columns["chunk_s"] for gap in np.diff(chunk)]
    good = sum(a <= SLO["ttft_s"] and b <= SLO["tpot_s"] for a, b in zip(ttft, tpot, strict=True))
    tokens_in, tokens_out = sum(columns["input_tokens"]), sum(columns["output_tokens"])
    ms = lambda values: stats([value * 1e3 for value in values])  # noqa: E731
    return {
        **_header("serve", name, prefill, decode, mixed),
        "base_url": "http://127.0.0.1:8000",
        "endpoint": "/v1/completions",
        "workload": {
            "kind": "random",
            "input_tokens": 512,
            "output_tokens": 64,
            "range_ratio": 0.5,
            "range_convention": "vllm",
            "seed": seed,
        },
        "arrival": {"kind": "poisson", "rate": rate, "burstiness": 1.0, "max_concurrency": None},
        "slo": SLO,
        "window": {"begin_s": begin, "end_s": end, "excluded_requests": count - len(inside)},
        "token_count_source": "chunks",
        "metrics": {
            "duration_s": duration,
            "sent": len(inside),
            "completed": len(inside),
            "failed": 0,
            "input_tokens": tokens_in,
            "output_tokens": tokens_out,
            "request_throughput": len(inside) / duration,
            "input_throughput": tokens_in / duration,
            "output_throughput": tokens_out / duration,
            "total_throughput": (tokens_in + tokens_out) / duration,
            "goodput": good / duration,
            "attainment": good / len(inside),
            "ttft_ms": ms(ttft),
            "client_queue_ms": ms([0.0002] * len(inside)),
            "ttst_ms": ms(ttst),
            "tpot_ms": ms(tpot),
            "itl_ms": ms(gaps),
            "e2e_ms": ms(e2e),
            "phases": {
                key: stats([block["phases"][key][i] for i in inside]) for key in block["phases"]
            },
        },
        "client": {"cpu_s": 0.5, "tokens_per_cpu_s": tokens_out / 0.5},
        "requests": block,
    }


def batch_result(name: str = "1p1d") -> dict[str, Any]:
    """A file of kind "batch": TTFT flat up to 1,024 tokens, then proportional to them."""
    rows = [
        {
            "batch": batch,
            "input_tokens": length,
            "output_tokens": 16,
            "ttft_s": max(0.05, 0.05 * batch * length / 1024),
            "latency_s": max(0.05, 0.05 * batch * length / 1024) + 16 * 0.01,
            "input_throughput": batch * length / max(0.05, 0.05 * batch * length / 1024),
            "output_throughput": batch * 100.0,
            "last_token_throughput": batch * 100.0,
        }
        for batch in (1, 2, 4, 8, 16)
        for length in (64, 256, 1024)
    ]
    return {**_header("batch", name, 1, 1, 0), "rows": rows}


def steps_result(name: str = "tiny") -> dict[str, Any]:
    """A file of kind "steps": 10 us a token, 5 ms and 10 us a sequence, 10 GB/s."""
    return {
        **_header("steps", name, 0, 0, 1),
        "topology": None,
        "prefill": [
            {"tokens": tokens, "context": context, "seconds": tokens * 1e-5 + context * 1e-6}
            for context in (0, 512)
            for tokens in (256, 32, 1024)
        ],
        "decode": [
            {"batch": batch, "context": 512, "seconds": 5e-3 + batch * 1e-5} for batch in (1, 8, 32)
        ],
        "transfer": [{"blocks": n, "bytes": n * 10**6, "seconds": n * 1e-4} for n in (1, 4)],
    }


def goodput_result(name: str, rate: float) -> dict[str, Any]:
    """A file of kind "goodput": a search that ended at `rate`."""
    points = [
        {
            "rate": rate * share,
            "attainment": min(1.0, 1.45 - 0.5 * share),
            "goodput": rate * share * min(1.0, 1.45 - 0.5 * share),
            "requests": 200,
            "meets": share <= 1,
        }
        for share in (0.5, 0.9, 1.0, 1.1, 1.5)
    ]
    return {
        **_header("goodput", name, 1, 1, 0),
        "slo": SLO,
        "points": points,
        "rate": rate,
        "confidence": 0.95,
        "interval": [rate * 0.9, rate * 1.1],
    }


def _header(kind: str, name: str, prefill: int, decode: int, mixed: int) -> dict[str, Any]:
    return {
        "schema": "tasuki.bench/1",
        "kind": kind,
        "created": "2026-11-22T01:02:03Z",
        "command": ["tasuki", "bench", kind],
        "label": name,
        "topology": {
            "name": name,
            "prefill": prefill,
            "decode": decode,
            "mixed": mixed,
            "tensor_parallel": {"prefill": 1, "decode": 1, "mixed": 1},
            "workers": prefill + decode + mixed,
            "gpus": 0,
        },
        "model": "smollm2-135m-instruct",
        "git_revision": "0" * 40,
        "version": "0.1.0",
        "machine": {"cpu": "model", "cores": 2, "memory_bytes": 0, "gpus": [], "os": "Linux"},
    }


TOPOLOGIES = {"1p1d": (1, 1, 0), "1p2d": (1, 2, 0), "2p1d": (2, 1, 0), "3m": (0, 0, 3)}


def write_sweep(folder: Path, rates: tuple[float, ...] = (1, 2, 4, 6, 8), count: int = 120) -> Path:
    """A sweep's folder: every topology at every rate, a search each, one batch table."""
    for name, (prefill, decode, mixed) in TOPOLOGIES.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for rate in rates:
            result = serve_result(name, prefill, decode, mixed, rate, count)
            (folder / name / f"rate-{rate:g}.json").write_text(json.dumps(result))
        search = goodput_result(name, 2.0 + prefill + 1.3 * mixed)
        (folder / name / "goodput.json").write_text(json.dumps(search))
    (folder / "batch.json").write_text(json.dumps(batch_result()))
    (folder / "sweep.json").write_text(json.dumps({"schema": "tasuki.sweep/1", "points": []}))
    return folder
