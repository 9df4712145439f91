"""What routers cost before the same HTTP workers, prefill and decode apart: ours and peers.

    python benchmarks/router_vs_peers.py --smg FOLDER/bin/smg --vllm-router FOLDER/bin/vllm-router

Workers are `crates/router/examples/fake_http_workers.rs`: prefill answers after 1 ms, decode
streams 64 chunks, each written by itself. Ours and vllm-router serve them as vLLM workers
(prefill first), ours and smg as SGLang workers (both legs at once). Beside them is `bare`, a
relay that copies bytes between sockets and parses nothing
(`crates/router/examples/bare_relay.rs`), without a pause between two reads of a stream and with
one as long as ours (`bare, paused`). The router is pinned to the first core; workers and the load
generator (`tasuki bench serve`) share the others.

*cost*: requests per second of the router's processor time, user and system, with so many clients
at once; *busy* is the share of the run in which it computed. Peers write each
chunk by itself; ours passes on together the chunks of a stream that come within 1 ms. It places
at once, as peers do (`--no-admission`). *paced*: the same with 128 clients where workers take 10 ms
for each chunk, so that chunks come one by one as from a model.
*latency*: TTFT of requests at half of the highest rate that a peer reached with 32 clients
(Poisson), less that of a worker that serves alone, asked directly. *memory*: the resident set's
highest with so many streams open. A request that fails ends the comparison.

Everything is started anew for each turn; medians of the turns.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
from programs import ROOT, build, free_port, running, said

from tasuki.bench.header import header, write_result
from tasuki.models.fetch import resolve_model

RESULT = ROOT / "benchmarks" / "results" / "router_vs_peers.json"
PROGRAMS = ("--bin", "tasuki-router", "--example", "fake_http_workers", "--example", "bare_relay")
# Tokens of SmolLM2 for some 1.5 and 16 KB of text.
PROMPTS = {"1.5 KB": 350, "16 KB": 3700}
CLIENTS = (32, 128)
CHUNKS = 64
PACED_STEP_MS = 10.0
OPEN_STEP_MS = 300.0
READY_S = 60.0
DEADLINE_S = 600.0
ENGINES = {
    "tasuki": ("vllm", "sglang"),
    "vllm-router": ("vllm",),
    "smg": ("sglang",),
    "bare": ("vllm",),
    "bare, paused": ("vllm",),
}
# The pause between two reads of a stream, ms; ours has at most the second one.
BARE = {"bare": 0.0, "bare, paused": 1.0}


class Bench:
    """The programs, and who runs on which core."""

    def __init__(self, programs: dict[str, Path], workers: Path, scratch: Path) -> None:
        self._programs, self._workers, self._scratch = programs, workers, scratch
        self._model = resolve_model("smollm2-135m")
        cores = psutil.Process().cpu_affinity()
        if len(cores) < 2:
            raise SystemExit("one processor core: the router needs one of its own, use 2 or more")
        self._own, self._others = cores[:1], cores[1:]

    @contextlib.contextmanager
    def workers(self, engine: str, step_ms: float) -> Iterator[dict[str, str]]:
        """Addresses of workers, by their part."""
        words = [str(self._workers), "--engine", engine, "--chunks", str(CHUNKS)]
        with running([*words, "--step-ms", str(step_ms)], self._others) as process:
            yield {part: said(process, f"{part} ") for part in ("prefill", "decode", "whole")}

    @contextlib.contextmanager
    def router(self, name: str, engine: str, step_ms: float = 0.0) -> Iterator[tuple[str, int]]:
        """URL and process id of a router before workers."""
        with self.workers(engine, step_ms) as at:
            port = free_port()
            with running(self._command(name, engine, at, port), self._own) as process:
                url = f"http://127.0.0.1:{port}"
                self._await(url)
                yield url, process.pid

    def _command(self, name: str, engine: str, at: dict[str, str], port: int) -> list[str]:
        words = [str(self._programs[name])]
        peer = ["--policy", "round_robin", "--prometheus-port", str(free_port())]
        if name == "tasuki":
            words += ["--log", "warn", "--max-concurrent-requests", "20000"]
            words += ["--max-connections", "20000", "--no-admission"]
            words += ["--worker", f"{engine}://{at['prefill']}?role=prefill"]
            words += ["--worker", f"{engine}://{at['decode']}?role=decode"]
        elif name in BARE:
            words += ["--prefill", at["prefill"], "--decode", at["decode"]]
            words += ["--pause-ms", str(BARE[name])]
        elif name == "smg":
            words += ["launch", "--host", "127.0.0.1", "--pd-disaggregation", *peer]
            words += ["--prefill", f"http://{at['prefill']}", "8998"]
            words += ["--decode", f"http://{at['decode']}", "--log-level", "warn"]
            words += ["--max-concurrent-requests", "20000"]
        else:
            words += ["--vllm-pd-disaggregation", *peer, "--log-level", "warning"]
            words += ["--prefill", f"http://{at['prefill']}", "--decode", f"http://{at['decode']}"]
            words += ["--max-concurrent-requests", "20000"]
        return [*words, "--port", str(port)]

    def _await(self, url: str) -> None:
        """Until it answers a request."""
        body = {"model": "fake", "messages": [{"role": "user", "content": "x"}], "stream": True}
        until = time.monotonic() + READY_S
        while True:
            with contextlib.suppress(httpx.TransportError):
                answer = httpx.post(f"{url}/v1/chat/completions", json=body)
                if answer.status_code == 200 and "[DONE]" in answer.text:
                    return
            if time.monotonic() > until:
                raise SystemExit(f"{url} serves nothing after {READY_S:.0f} s")
            time.sleep(0.5)

    def load(self, url: str, prompt: str, requests: int, *more: str) -> dict[str, Any]:
        """Metrics of one run of the load generator."""
        out = self._scratch / "load.json"
        command = [sys.executable, "-m", "tasuki", "bench", "serve", "--base-url", url]
        command += ["--endpoint", "chat", "--tokenizer", str(self._model), "--model", "fake"]
        command += ["--input-tokens", str(PROMPTS[prompt]), "--output-tokens", str(CHUNKS)]
        command += ["--num-requests", str(requests), "--warmup", "0", "--no-chunks", "--quiet"]
        done = subprocess.Popen(
            [*command, "--output", str(out), *more],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        psutil.Process(done.pid).cpu_affinity(self._others)
        printed, _ = done.communicate(timeout=DEADLINE_S)
        metrics: dict[str, Any] = (
            json.loads(out.read_text())["metrics"] if not done.returncode else {}
        )
        if not metrics or metrics["failed"]:
            raise SystemExit(f"the load failed:\n{printed[-3000:]}")
        return metrics

    def cost(
        self,
        name: str,
        engine: str,
        requests: int,
        *,
        prompt: str = "1.5 KB",
        clients: int = CLIENTS[-1],
        step_ms: float = 0.0,
    ) -> dict[str, float]:
        """Requests per second of processor time."""
        with self.router(name, engine, step_ms) as (url, pid):
            at_once = ("--max-concurrency", str(clients))
            self.load(url, prompt, clients, *at_once)
            process = psutil.Process(pid)
            before = process.cpu_times()
            metrics = self.load(url, prompt, requests, *at_once)
            after = process.cpu_times()
        cpu_s = after.user + after.system - before.user - before.system
        return {
            "requests_per_cpu_s": requests / cpu_s,
            "requests_per_s": requests / metrics["duration_s"],
            "busy": cpu_s / metrics["duration_s"],
        }

    def latency(self, name: str, engine: str, rate: float, requests: int) -> dict[str, float]:
        """TTFT at a rate, ms; `direct`: of the worker that serves alone."""
        at_rate = ("--request-rate", f"{rate:.0f}", "--seed", "7")
        if name == "direct":
            with self.workers(engine, 0.0) as at:
                metrics = self.load(f"http://{at['whole']}", "1.5 KB", requests, *at_rate)
        else:
            with self.router(name, engine) as (url, _):
                self.load(url, "1.5 KB", 32, "--max-concurrency", "32")
                metrics = self.load(url, "1.5 KB", requests, *at_rate)
        ttft = metrics["ttft_ms"]
        return {"ttft_p50_ms": ttft["median"], "ttft_p99_ms": ttft["p99"]}

    def memory(self, name: str, engine: str, streams: int) -> dict[str, float]:
        """The resident set's highest, idle and with streams open, MB."""
        with self.router(name, engine, OPEN_STEP_MS) as (url, pid):
            idle = psutil.Process(pid).memory_info().rss / 1e6
            self.load(url, "1.5 KB", streams, "--max-concurrency", str(streams))
            status = Path(f"/proc/{pid}/status").read_text()
        found = re.search(r"VmHWM:\s+(\d+) kB", status)
        assert found is not None
        return {"idle_mb": idle, "highest_mb": int(found[1]) * 1024 / 1e6}


def medians(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Of each figure over the turns; what is no figure is the same in all."""
    return {
        key: statistics.median(row[key] for row in rows) if isinstance(value, float) else value
        for key, value in rows[0].items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smg", type=Path, help="the peer's program; left out: not compared")
    parser.add_argument("--vllm-router", type=Path, help="likewise")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--streams", type=int, default=5000, help="open at a time; 0: not measured")
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    folder = build(*PROGRAMS)
    programs = {"tasuki": folder / "tasuki-router"}
    given = {"smg": options.smg, "vllm-router": options.vllm_router}
    programs |= {name: path.absolute() for name, path in given.items() if path}
    programs |= dict.fromkeys(BARE, folder / "examples" / "bare_relay")
    setups = [(name, engine) for name in programs for engine in ENGINES[name]]
    runs: list[dict[str, Any]] = []

    def keep(what: str, found: dict[str, float], **about: Any) -> None:
        runs.append({"what": what, **about, **found})
        print(json.dumps(runs[-1]), flush=True)

    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(programs, folder / "examples" / "fake_http_workers", Path(scratch))
        for _ in range(options.turns):
            for prompt in PROMPTS:
                for clients in CLIENTS:
                    for name, engine in setups:
                        found = bench.cost(
                            name, engine, options.requests, prompt=prompt, clients=clients
                        )
                        about = {"prompt": prompt, "clients": clients}
                        keep("cost", found, router=name, engine=engine, **about)
            for name, engine in setups:
                found = bench.cost(name, engine, options.requests, step_ms=PACED_STEP_MS)
                keep("paced", found, router=name, engine=engine)
        peers = [
            run["requests_per_s"]
            for run in runs
            if run["router"] not in ("tasuki", *BARE)
            and (run.get("prompt"), run.get("clients")) == ("1.5 KB", 32)
        ]
        rate = max(peers, default=1000.0) / 2
        for _ in range(options.turns):
            for name, engine in [("direct", "vllm"), *setups]:
                found = bench.latency(name, engine, rate, options.requests)
                keep("latency", found, router=name, engine=engine)
            for name, engine in setups:
                if options.streams and name not in BARE:
                    found = bench.memory(name, engine, options.streams)
                    keep("memory", found, router=name, engine=engine)
    names = ("what", "router", "engine", "prompt", "clients")
    grouped: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for run in runs:
        grouped.setdefault(tuple(run.get(name) for name in names), []).append(run)
    rows = [medians(each) for each in grouped.values()]
    result = header("router_vs_peers", label="router", topology=None, model="fake")
    result |= {"rate": rate, "streams": options.streams, "turns": options.turns}
    write_result(options.output, result | {"medians": rows, "runs": runs})
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()
