"""What the router costs: tokens per second of its processor time, added latency, memory.

    python benchmarks/router.py                              this tree's
    python benchmarks/router.py --before PATH/tasuki-router  and another build's, by turns

The router is `tasuki-router`, pinned to the first core; `crates/router/examples/fake_workers.rs`
(1 prefill, 1 decode and, for colocated answers, 2 mixed workers that answer at once) and the
load generator (`tasuki bench serve`) share the others. *Processor time* is the router's own,
user and system, over a load of streams of 256 tokens, one token a chunk, so that it does not
matter who is the bottleneck. *Added latency* is TTFT of one client after another through the
router, less that of the same client at `tasuki bench fake-server`, which answers as quickly.
*Memory* is what the router's resident set grows by while so many streams are open.

Every program is started anew for each turn; medians of the turns.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from programs import ROOT, build, running, said

from tasuki.bench.header import header, write_result
from tasuki.models.fetch import resolve_model

PROGRAMS = ("--bin", "tasuki-router", "--example", "fake_workers")
RESULT = ROOT / "benchmarks" / "results" / "router.json"
SETUPS = {"colocated": ("--mixed", "2"), "split": ("--prefill", "1", "--decode", "1")}
STREAMS, STREAM_TOKENS, STEP_MS = 64, 256, 5.0
OPEN_STEP_MS, OPEN_TOKENS = 1000.0, 20
DEADLINE_S = 600.0


class Bench:
    """Programs of one comparison, and who runs on which core."""

    def __init__(self, folder: Path, model: Path, scratch: Path) -> None:
        self._workers = folder / "examples" / "fake_workers"
        self._model, self._scratch = model, scratch
        cores = psutil.Process().cpu_affinity()
        if len(cores) < 2:
            raise SystemExit("one processor core: the router needs one of its own, use 2 or more")
        self._own, self._others = cores[:1], cores[1:]
        text = json.loads((model / "config.json").read_text())
        self._limits = (text["vocab_size"], text["max_position_embeddings"])

    @contextlib.contextmanager
    def router(self, program: Path, setup: str, step_ms: float) -> Iterator[tuple[str, int]]:
        """URL and process id of a router before fake workers."""
        words = [str(self._workers), *SETUPS[setup], "--step-ms", str(step_ms)]
        words += ["--vocab-size", str(self._limits[0]), "--max-model-len", str(self._limits[1])]
        with running(words, self._others) as workers:
            command = [str(program), "--model", str(self._model), "--port", "0", "--log", "warn"]
            command += ["--max-concurrent-requests", "20000", "--max-connections", "20000"]
            command += ["--served-model-name", "fake", "--strict-roles"]
            for _ in range(2):
                command += ["--worker", said(workers, "worker ")]
            with running(command, self._own) as process:
                yield said(process, "listening on "), process.pid

    @contextlib.contextmanager
    def direct(self) -> Iterator[str]:
        """URL of a server that answers at once."""
        command = [sys.executable, "-m", "tasuki", "bench", "fake-server", "--port", "0"]
        with running(command, self._own) as process:
            yield said(process, "listening on ")

    def load(self, url: str, *, requests: int, at_a_time: int, tokens: int) -> dict[str, Any]:
        """Metrics of one run of the load generator."""
        out = self._scratch / "load.json"
        command = [sys.executable, "-m", "tasuki", "bench", "serve", "--base-url", url]
        command += ["--endpoint", "chat", "--tokenizer", str(self._model), "--usage-stats", "final"]
        command += ["--input-tokens", "64", "--output-tokens", str(tokens), "--no-chunks"]
        command += ["--num-requests", str(requests), "--max-concurrency", str(at_a_time)]
        command += ["--warmup", "4", "--quiet", "--output", str(out)]
        done = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        psutil.Process(done.pid).cpu_affinity(self._others)
        printed, _ = done.communicate(timeout=DEADLINE_S)
        metrics: dict[str, Any] = (
            json.loads(out.read_text())["metrics"] if not done.returncode else {}
        )
        if not metrics or metrics["failed"]:
            raise SystemExit(f"the load failed:\n{printed[-3000:]}")
        return metrics

    def cost(self, program: Path, setup: str, requests: int) -> dict[str, float]:
        """Tokens per second of the router's processor time."""
        with self.router(program, setup, STEP_MS) as (url, pid):
            process = psutil.Process(pid)
            self.load(url, requests=STREAMS, at_a_time=STREAMS, tokens=8)
            before = process.cpu_times()
            metrics = self.load(url, requests=requests, at_a_time=STREAMS, tokens=STREAM_TOKENS)
            after = process.cpu_times()
        cpu_s = after.user + after.system - before.user - before.system
        tokens = (requests + 4) * STREAM_TOKENS
        return {
            "tokens_per_cpu_s": tokens / cpu_s,
            "busy": cpu_s / metrics["duration_s"],
            "output_throughput": metrics["output_throughput"],
        }

    def latency(self, program: Path | None, setup: str, requests: int) -> dict[str, float]:
        """TTFT of one client after another, ms; through a router, or without."""
        router = self.router(program, setup, STEP_MS) if program else None
        with router or self.direct() as found:
            url = found if isinstance(found, str) else found[0]
            metrics = self.load(url, requests=requests, at_a_time=1, tokens=2)
        return {
            "ttft_p50_ms": metrics["ttft_ms"]["median"],
            "ttft_p99_ms": metrics["ttft_ms"]["p99"],
        }

    def memory(self, program: Path, streams: int) -> dict[str, float]:
        """What an open stream takes of the router's resident set, bytes."""
        with self.router(program, "split", OPEN_STEP_MS) as (url, pid):
            process, most = psutil.Process(pid), [0]
            self.load(url, requests=STREAMS, at_a_time=STREAMS, tokens=2)
            idle, over = process.memory_info().rss, threading.Event()

            def watch() -> None:
                while not over.wait(0.2):
                    most[0] = max(most[0], process.memory_info().rss)

            thread = threading.Thread(target=watch)
            thread.start()
            try:
                self.load(url, requests=streams, at_a_time=streams, tokens=OPEN_TOKENS)
            finally:
                over.set()
                thread.join()
            time.sleep(2.0)
            left = process.memory_info().rss
        return {
            "idle_bytes": idle,
            "bytes_per_stream": (most[0] - idle) / streams,
            "left_bytes_per_stream": (left - idle) / streams,
        }


def medians(rows: list[dict[str, float]]) -> dict[str, float]:
    """Of each figure over the turns."""
    return {key: statistics.median(row[key] for row in rows) for key in rows[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path, help="another build of tasuki-router")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--requests", type=int, default=640, help="of 256 tokens, 64 at a time")
    parser.add_argument("--streams", type=int, default=5000, help="open at a time; 0: not measured")
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    folder = build(*PROGRAMS)
    programs = {"now": folder / "tasuki-router"}
    if options.before:
        programs["before"] = options.before.resolve()
    model = Path(resolve_model("smollm2-135m"))
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(folder, model, Path(scratch))

        def keep(what: str, router: str, setup: str, found: dict[str, float]) -> None:
            runs.append({"what": what, "router": router, "setup": setup, **found})
            print(json.dumps(runs[-1]), flush=True)

        for _ in range(options.turns):
            keep("latency", "none", "direct", bench.latency(None, "direct", 200))
            for name, program in programs.items():
                for setup in SETUPS:
                    keep("cost", name, setup, bench.cost(program, setup, options.requests))
                    keep("latency", name, setup, bench.latency(program, setup, 200))
                if options.streams:
                    keep("memory", name, "split", bench.memory(program, options.streams))
    grouped: dict[tuple[str, str, str], list[dict[str, float]]] = {}
    for run in runs:
        key = (run["what"], run["router"], run["setup"])
        figures = {k: v for k, v in run.items() if not isinstance(v, str)}
        grouped.setdefault(key, []).append(figures)
    names = ("what", "router", "setup")
    rows = [dict(zip(names, key, strict=True)) | medians(each) for key, each in grouped.items()]
    result = header("router", label="router", topology=None, model="fake")
    result |= {"streams": options.streams, "requests": options.requests, "turns": options.turns}
    write_result(options.output, result | {"medians": rows, "runs": runs})
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()
