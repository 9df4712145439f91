"""The same requests split 1:1 and colocated, on this machine, through HTTP.

    python benchmarks/split_vs_colocated.py

Three servers run at once, each started by `tasuki serve`: 1 prefill + 1 decode,
2 mixed, 1 mixed. Rounds take turns between them, so that whatever else the
machine does meets all alike; idle servers take no processor time. A measurement
during which other processes used more than QUIET_CORES is repeated up to --tries
times and the quietest is kept. Every number is the median over rounds. Prompts
are random token ids, new in each measurement: no prefix is ever in a cache.

Writes benchmarks/results/split_vs_colocated.json and prints the tables of
RESULTS.md. Definitions (TTFT, TTST, ITL): the time of a token is when its
server-sent event arrived; requests are due when they are sent (closed loop).
*Transfer* is the time from the first block posted to the last block there.
*Exposed* is what the client waits for: from the end of the prefill worker's last
chunk until the decode worker may schedule the request. *Hidden* is the part of the
transfer that ran before the decode worker heard of that end.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from tasuki.bench.header import header, write_result

REPOSITORY = Path(__file__).resolve().parents[1]
RESULT = REPOSITORY / "benchmarks" / "results" / "split_vs_colocated.json"
SERVERS = {
    "split 1 + 1": ["--prefill", "1", "--decode", "1", "--strict-roles"],
    "2 mixed": ["--mixed", "2"],
    "1 mixed": ["--mixed", "1"],
}
START_DEADLINE_S = 300.0
QUIET_CORES = 0.15
PHASES = (
    "queue",
    "prefill",
    "handshake",
    "transfer",
    "transfer_exposed",
    "transfer_tail",
    "first_decode",
    "decode",
)


@dataclass(frozen=True)
class Load:
    """One scenario: `requests` of one shape, `concurrency` at a time."""

    name: str
    concurrency: int
    requests: int
    prompt_tokens: int
    output_tokens: int


LOADS = (
    Load("one at a time", 1, 4, 512, 48),
    Load("4 at a time", 4, 12, 512, 48),
    Load("8 at a time, short prompts", 8, 24, 96, 48),
)


@dataclass(frozen=True)
class Measured:
    """One request; times in milliseconds.

    Attributes:
        itl_ms: gaps between successive tokens after the second.
        phases_ms: the server's own account.
    """

    ttft_ms: float
    ttst_ms: float
    e2e_ms: float
    itl_ms: list[float]
    phases_ms: dict[str, float]
    transfer_bytes: int


@dataclass(frozen=True)
class Server:
    url: str
    model: str
    vocabulary: int


@contextmanager
def serve(arguments: list[str], options: argparse.Namespace) -> Iterator[Server]:
    """`tasuki serve` until the end of the block."""
    command = [sys.executable, "-m", "tasuki", "serve", *arguments, "--port", "0"]
    command += ["--model", options.model, "--dtype", options.dtype]
    command += ["--max-model-len", "2048", "--kv-memory", "500000000"]
    with tempfile.TemporaryFile("w+") as log:
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, cwd=REPOSITORY, env=environment
        )
        try:
            url = _wait_for_url(process, log)
            model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
            yield Server(url, model, options.vocabulary)
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)


def _wait_for_url(process: subprocess.Popen[bytes], log: Any) -> str:
    end_s = time.monotonic() + START_DEADLINE_S
    while time.monotonic() < end_s:
        log.seek(0)
        text = log.read()
        if found := re.search(r"^Serving .* at (http://\S+)$", text, re.M):
            return found.group(1)
        if process.poll() is not None:
            raise SystemExit(f"the server ended with {process.returncode}:\n{text}")
        time.sleep(0.2)
    raise SystemExit(f"the server was not ready after {START_DEADLINE_S:g} s")


def ask(client: httpx.Client, server: Server, prompt: list[int], output_tokens: int) -> Measured:
    """One streamed request."""
    body = {
        "model": server.model,
        "prompt": prompt,
        "max_tokens": output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    arrivals_s: list[float] = []
    timings: dict[str, Any] = {}
    sent_s = time.perf_counter()
    with client.stream("POST", f"{server.url}/v1/completions", json=body) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            now_s = time.perf_counter()
            chunk = json.loads(line.removeprefix("data: "))
            timings = chunk.get("timings") or timings
            for choice in chunk["choices"]:
                arrivals_s += [now_s] * len(choice.get("token_ids") or ())
    if len(arrivals_s) != output_tokens:
        raise SystemExit(f"{len(arrivals_s)} tokens came, not {output_tokens}")
    since_ms = [1000 * (arrival - sent_s) for arrival in arrivals_s]
    return Measured(
        ttft_ms=since_ms[0],
        ttst_ms=since_ms[1],
        e2e_ms=since_ms[-1],
        itl_ms=[b - a for a, b in itertools.pairwise(since_ms[1:])],
        phases_ms={phase: timings.get(f"{phase}_ms", 0.0) for phase in PHASES},
        transfer_bytes=timings.get("transfer_bytes", 0),
    )


def run_round(server: Server, load: Load, seed: int) -> dict[str, float]:
    """All requests of a load once; means and percentiles of this round."""
    draw = random.Random(seed)
    prompts = [
        [draw.randrange(100, server.vocabulary) for _ in range(load.prompt_tokens)]
        for _ in range(load.requests)
    ]
    with httpx.Client(timeout=300, trust_env=False) as client:
        begin_s = time.perf_counter()
        with ThreadPoolExecutor(load.concurrency) as pool:
            done = list(pool.map(lambda p: ask(client, server, p, load.output_tokens), prompts))
        duration_s = time.perf_counter() - begin_s
    gaps = sorted(gap for one in done for gap in one.itl_ms)
    row = {
        "ttft_ms": statistics.mean(one.ttft_ms for one in done),
        "ttst_ms": statistics.mean(one.ttst_ms for one in done),
        "itl_ms": statistics.mean(gaps),
        "itl_p99_ms": gaps[int(0.99 * (len(gaps) - 1))],
        "e2e_ms": statistics.mean(one.e2e_ms for one in done),
        "output_tokens_per_s": load.requests * load.output_tokens / duration_s,
        "transfer_bytes": statistics.mean(one.transfer_bytes for one in done),
    }
    for phase in PHASES:
        row[f"{phase}_ms"] = statistics.mean(one.phases_ms[phase] for one in done)
    row["transfer_hidden_ms"] = statistics.mean(
        max(0.0, one.phases_ms["transfer"] - one.phases_ms["transfer_tail"]) for one in done
    )
    return row


def quietest_round(server: Server, load: Load, seeds: range) -> dict[str, float]:
    """`run_round`, with the next seed while other processes are busy."""
    best: dict[str, float] = {}
    for seed in seeds:
        begin_s, before_s = time.monotonic(), others_cpu_s()
        row = run_round(server, load, seed)
        row["other_cores"] = (others_cpu_s() - before_s) / (time.monotonic() - begin_s)
        if not best or row["other_cores"] < best["other_cores"]:
            best = row
        if best["other_cores"] <= QUIET_CORES:
            break
    return best


def others_cpu_s() -> float:
    """Processor seconds used so far on this machine, but for this process and its servers."""
    times = psutil.cpu_times()
    busy_s = times.user + times.nice + times.system
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            own = process.cpu_times()
            busy_s -= own.user + own.system
    return float(busy_s)


def table(results: dict[str, dict[str, dict[str, float]]]) -> str:
    """The Markdown of RESULTS.md."""
    columns = {
        "TTFT": "ttft_ms",
        "TTST": "ttst_ms",
        "ITL": "itl_ms",
        "ITL p99": "itl_p99_ms",
        "E2E": "e2e_ms",
        "output tok/s": "output_tokens_per_s",
        "transfer": "transfer_ms",
        "hidden": "transfer_hidden_ms",
        "exposed": "transfer_exposed_ms",
    }
    lines = []
    for load in LOADS:
        lines += [
            f"**{load.name}**: {load.requests} requests, {load.prompt_tokens} prompt and"
            f" {load.output_tokens} output tokens each (ms unless said otherwise)",
            "",
            "| | " + " | ".join(columns) + " |",
            "|---" * (len(columns) + 1) + "|",
        ]
        for server, row in results[load.name].items():
            cells = [f"{row[key]:.1f}" for key in columns.values()]
            lines.append(f"| {server} | " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tries", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=49_000, help="token ids drawn below this")
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()

    rounds: dict[str, dict[str, list[dict[str, float]]]] = {
        load.name: {name: [] for name in SERVERS} for load in LOADS
    }
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(serve(arguments, options))
            for name, arguments in SERVERS.items()
        }
        for number in range(-1, options.rounds):  # round -1 warms up
            for index, load in enumerate(LOADS):
                first = 1000 * (number + 1) + 100 * index
                tries = options.tries if number >= 0 else 1
                for name, server in servers.items():
                    row = quietest_round(server, load, range(first, first + tries))
                    if number >= 0:
                        rounds[load.name][name].append(row)
                    print(
                        f"round {number}, {load.name}, {name}: TTFT {row['ttft_ms']:.0f} ms, "
                        f"{row['output_tokens_per_s']:.1f} tok/s, "
                        f"others {row['other_cores']:.2f} cores",
                        file=sys.stderr,
                    )
    medians = {
        load: {
            name: {key: statistics.median(r[key] for r in rows) for key in rows[0]}
            for name, rows in by_server.items()
        }
        for load, by_server in rounds.items()
    }
    described = header("split_vs_colocated", label="split", topology=None, model=options.model)
    document = described | {
        "dtype": options.dtype,
        "loads": [asdict(load) for load in LOADS],
        "rounds": options.rounds,
        "medians": medians,
        "per_round": rounds,
    }
    write_result(options.output, document)
    print(table(medians))


if __name__ == "__main__":
    main()
