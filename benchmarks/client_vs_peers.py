"""Our load generator beside `vllm bench serve` and `aiperf`: do they agree, what do they cost?

    python benchmarks/client_vs_peers.py --vllm VENV/bin/vllm --aiperf VENV/bin/aiperf

The server is `tasuki bench fake-server` with set delays, or as fast as it can; clients take
turns against it, all closed loop, the same lengths, greedy, exact output lengths.

*Cost*: tokens per second of processor time of the client and all its children. Every client
runs a short and a long load; the difference counts, so that starting up (imports, tokenizers,
making prompts) does not. *Agreement*: throughput, TTFT from sending and TPOT of a load with
known delays, against ours. *Pacing*: sent minus due, open loop, 1,000 requests a second.

Writes benchmarks/results/client_vs_peers.json. The median of --rounds is what is told.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tasuki.bench.header import header, write_result

REPOSITORY = Path(__file__).resolve().parents[1]
RESULT = REPOSITORY / "benchmarks" / "results" / "client_vs_peers.json"
DEADLINE_S = 600
FAST_TOKENS = 512
INPUT_TOKENS = 32
CONCURRENCY = 8
MODEL = "model"  # what the clients ask for


@dataclass(frozen=True)
class Load:
    """One closed loop: `requests` of `output_tokens`, `concurrency` at a time.

    Attributes:
        warmups: requests before it, unmeasured. vLLM's are its first measured prompt.
        seed: draws the prompts.
    """

    requests: int
    output_tokens: int
    concurrency: int = CONCURRENCY
    input_tokens: int = INPUT_TOKENS
    warmups: int = 1
    seed: int = 0


@dataclass(frozen=True)
class Seen:
    """What a client reported, and what it used."""

    output_throughput: float
    ttft_ms: float
    tpot_ms: float
    cpu_s: float


class Client:
    """A load generator; subclasses say how to call it and where it writes."""

    name = ""
    # Short and long, some seconds apart in processor time.
    fast_requests = (20, 420)

    def __init__(self, program: str, tokenizer: Path) -> None:
        self.program = program
        self.tokenizer = tokenizer

    def run(self, url: str, load: Load) -> Seen:
        """Send a load; the processor time is that of the process and its children."""
        with tempfile.TemporaryDirectory() as folder:
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            done = subprocess.run(
                self.command(url, load, folder),
                env=os.environ | self.environment(folder),
                capture_output=True,
                text=True,
                timeout=DEADLINE_S,
            )
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            if done.returncode:
                raise SystemExit(f"{self.name} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
            used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            return Seen(*self.read(Path(folder)), cpu_s=used)

    def command(self, url: str, load: Load, folder: str) -> list[str]:
        raise NotImplementedError

    def environment(self, folder: str) -> dict[str, str]:
        return {}

    def read(self, folder: Path) -> tuple[float, float, float]:
        """Output tokens a second, TTFT from sending in ms, TPOT in ms."""
        raise NotImplementedError


class Tasuki(Client):
    name = "tasuki bench serve"
    fast_requests = (200, 20200)

    def command(self, url: str, load: Load, folder: str) -> list[str]:
        return [
            *self.program.split(),
            *("serve", "--quiet", "--no-chunks", "--base-url", url),
            *("--num-requests", str(load.requests), "--max-concurrency", str(load.concurrency)),
            *("--input-tokens", str(load.input_tokens)),
            *("--output-tokens", str(load.output_tokens), "--model", MODEL),
            *("--warmup", str(load.warmups), "--seed", str(load.seed)),
            *("--tokenizer", str(self.tokenizer), "--output", f"{folder}/result.json"),
        ]

    def read(self, folder: Path) -> tuple[float, float, float]:
        metrics = json.loads((folder / "result.json").read_text())["metrics"]
        ttft, tpot = metrics["ttft_from_sent_ms"], metrics["tpot_ms"]
        return metrics["output_throughput"], ttft["mean"], tpot["mean"]


class Vllm(Client):
    name = "vllm bench serve"
    fast_requests = (20, 3020)

    def command(self, url: str, load: Load, folder: str) -> list[str]:
        return [
            *(self.program, "bench", "serve", "--backend", "openai", "--base-url", url),
            *("--model", MODEL, "--tokenizer", str(self.tokenizer), "--dataset-name", "random"),
            *("--random-input-len", str(load.input_tokens)),
            *("--random-output-len", str(load.output_tokens)),
            *("--num-prompts", str(load.requests), "--max-concurrency", str(load.concurrency)),
            *("--num-warmups", str(load.warmups), "--seed", str(load.seed)),
            *("--ignore-eos", "--temperature", "0", "--disable-tqdm"),
            *("--save-result", "--result-dir", folder, "--result-filename", "result.json"),
        ]

    def read(self, folder: Path) -> tuple[float, float, float]:
        result = json.loads((folder / "result.json").read_text())
        return result["output_throughput"], result["mean_ttft_ms"], result["mean_tpot_ms"]


class AiPerf(Client):
    name = "aiperf"
    _TOKENIZER = "local/model"

    def command(self, url: str, load: Load, folder: str) -> list[str]:
        warmups = ["--warmup-request-count", str(load.warmups)] if load.warmups else []
        return [
            *(self.program, "profile", "--model", MODEL, "--tokenizer", self._TOKENIZER),
            *("--url", url, "--endpoint-type", "completions", "--streaming"),
            *("--request-count", str(load.requests), "--concurrency", str(load.concurrency)),
            *("--isl", str(load.input_tokens), "--osl", str(load.output_tokens)),
            *(*warmups, "--random-seed", str(load.seed), "--extra-inputs", "ignore_eos:true"),
            *("--use-server-token-count", "--no-server-metrics", "--no-gpu-telemetry"),
            *("--ui", "none", "--output-artifact-dir", folder),
        ]

    def environment(self, folder: str) -> dict[str, str]:
        """Shows it the tokenizer as a cached model: it takes no folder while offline."""
        cache = Path(folder) / "hf" / "hub" / f"models--{self._TOKENIZER.replace('/', '--')}"
        snapshot = cache / "snapshots" / ("0" * 40)
        snapshot.mkdir(parents=True)
        (cache / "refs").mkdir()
        (cache / "refs" / "main").write_text("0" * 40)
        for file in self.tokenizer.glob("*.json"):
            (snapshot / file.name).symlink_to(file)
        return {"HF_HOME": f"{folder}/hf", "HF_HUB_OFFLINE": "1"}

    def read(self, folder: Path) -> tuple[float, float, float]:
        result = json.loads(next(folder.rglob("profile_export_aiperf.json")).read_text())
        names = ("output_token_throughput", "time_to_first_token", "inter_token_latency")
        throughput, ttft, tpot = (float(result[name]["avg"]) for name in names)
        return throughput, ttft, tpot


@contextmanager
def fake_server(tasuki: str, *options: str) -> Iterator[str]:
    """A server for the time of the block; gives its URL."""
    command = [*tasuki.split(), "fake-server", "--port", "0", *options]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        yield server.stdout.readline().split()[-1]
    finally:
        server.terminate()
        server.wait(timeout=30)


def cost(clients: list[Client], tasuki: str, rounds: int) -> dict[str, list[float]]:
    """Tokens per second of processor time, one figure a round and client."""
    found: dict[str, list[float]] = {client.name: [] for client in clients}
    with fake_server(tasuki) as url:
        for _ in range(rounds):
            for client in clients:
                short, long = (
                    client.run(url, Load(requests, FAST_TOKENS)).cpu_s
                    for requests in client.fast_requests
                )
                tokens = (client.fast_requests[1] - client.fast_requests[0]) * FAST_TOKENS
                found[client.name].append(tokens / (long - short))
                print(f"cost: {client.name}: {found[client.name][-1]:,.0f} tokens per CPU-second")
    return found


def agreement(clients: list[Client], tasuki: str, rounds: int) -> dict[str, list[Seen]]:
    """What each client says of a load of 200 ms to the first token and 10 ms to each further."""
    found: dict[str, list[Seen]] = {client.name: [] for client in clients}
    with fake_server(tasuki, "--ttft-ms", "200", "--itl-ms", "10") as url:
        for _ in range(rounds):
            for client in clients:
                found[client.name].append(client.run(url, Load(128, 128)))
                print(f"agreement: {client.name}: {found[client.name][-1]}")
    return found


def pacing(tasuki: str, rounds: int) -> list[dict[str, Any]]:
    """Sent minus due at 1,000 requests a second, in ms."""
    found = []
    with fake_server(tasuki, "--ttft-ms", "5") as url, tempfile.TemporaryDirectory() as folder:
        for _ in range(rounds):
            output = f"{folder}/result.json"
            command = [
                *tasuki.split(),
                *("serve", "--quiet", "--no-chunks", "--base-url", url, "--output", output),
                *("--request-rate", "1000", "--num-requests", "10000"),
                *("--input-tokens", "32", "--output-tokens", "2"),
            ]
            subprocess.run(command, check=True, capture_output=True, timeout=DEADLINE_S)
            found.append(json.loads(Path(output).read_text())["metrics"]["pacing_error_ms"])
            print(f"pacing: p99 {found[-1]['p99']:.3f} ms")
    return found


def table(costs: dict[str, list[float]], agreed: dict[str, list[Seen]]) -> str:
    """The table of RESULTS.md."""
    ours = Tasuki.name
    lines = [
        "| client | tokens per CPU-second | ours / its | output tok/s | TTFT ms | TPOT ms |",
        "|---|---|---|---|---|---|",
    ]
    for name in agreed:
        middle = statistics.median(costs[name])
        figures = []
        for field in ("output_throughput", "ttft_ms", "tpot_ms"):
            value, own = (
                statistics.median(getattr(s, field) for s in agreed[who]) for who in (name, ours)
            )
            off = f" ({value / own - 1:+.1%})" if name != ours else ""
            figures.append(f"{value:,.2f}{off}")
        ratio = statistics.median(costs[ours]) / middle
        lines.append(f"| {name} | {middle:,.0f} | {ratio:.1f}x | {' | '.join(figures)} |")
    return "\n".join(lines)


def parser_of(description: str) -> argparse.ArgumentParser:
    """The options that say which clients there are."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--tasuki", default=f"{sys.prefix}/bin/tasuki bench")
    parser.add_argument("--vllm", required=True, help="the program vllm")
    parser.add_argument("--aiperf", required=True, help="the program aiperf")
    parser.add_argument("--tokenizer", type=Path, required=True, help="a model's folder")
    return parser


def clients_of(args: argparse.Namespace) -> list[Client]:
    """Ours first, then the peers, of `parser_of`'s options."""
    return [
        Tasuki(args.tasuki, args.tokenizer),
        Vllm(args.vllm, args.tokenizer),
        AiPerf(args.aiperf, args.tokenizer),
    ]


def main() -> None:
    parser = parser_of(__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    clients = clients_of(args)
    load_before = os.getloadavg()[0]
    costs = cost(clients, args.tasuki, args.rounds)
    agreed = agreement(clients, args.tasuki, args.rounds)
    paced = pacing(args.tasuki, args.rounds)
    described = header("client_vs_peers", label="clients", topology=None, model="fake server")
    result = described | {
        "load_before": load_before,
        "tokens_per_cpu_s": costs,
        "agreement": {name: [asdict(seen) for seen in all_] for name, all_ in agreed.items()},
        "pacing_error_ms": paced,
    }
    write_result(RESULT, result)
    print(table(costs, agreed))
    p99 = statistics.median(each["p99"] for each in paced)
    print(f"pacing error at 1,000 requests/s: p99 {p99:.3f} ms (median of {len(paced)})")


if __name__ == "__main__":
    main()
