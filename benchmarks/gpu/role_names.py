"""What the names of two workers' roles cost where roles are preferences.

    python benchmarks/gpu/role_names.py                      2 GPUs, 13 minutes
    python benchmarks/gpu/role_names.py --tiny --device cpu  the same code on any machine

One `tasuki serve` of two workers. Before each run the admin API gives them their roles, which
fix nothing else, so that all ways of naming have the same processes and take turns in one lease:
in each round every workload runs once with every naming, in another order each time. Closed
loops of W1's and W2's lengths (`w1_w2.py`) and of a mixture, three of W1 to one of W2.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import statistics
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from shapes import SHAPES, TINY, write_model
from w1_w2 import TINY_WORKLOADS, WORKLOADS, Workload, measure

from tasuki.bench.errors import RunFailedError
from tasuki.bench.header import header, write_result
from tasuki.bench.serving import Serving
from tasuki.launch.config import Topology

RESULT = Path(__file__).resolve().parents[1] / "results" / "role_names.json"
NAMES = {
    "2mixed": ("mixed", "mixed"),
    "1mixed1d": ("mixed", "decode"),
    "1p1d": ("prefill", "decode"),
    "1p1mixed": ("prefill", "mixed"),
}
DEADLINE_S = 10.0
WARMUP = 8  # unmeasured requests before each run; the server is warm
W2_SHARE = 0.25  # of the mixture's requests


def mixture(path: Path, requests: int, *, tiny: bool) -> Path:
    """A trace of W1's and W2's lengths, shuffled; its times are not used."""
    draw = random.Random(4711)
    short, long = ((8, 40), (300, 8)) if tiny else ((5, 1_019), (5_000, 250))
    many = round(requests * W2_SHARE)
    lengths = [long] * many
    lengths += [(draw.randint(*short), draw.randint(*short)) for _ in range(requests - many)]
    draw.shuffle(lengths)
    lines = [
        json.dumps({"timestamp": 0, "input_length": isl, "output_length": osl, "hash_ids": []})
        for isl, osl in lengths
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def workloads(options: argparse.Namespace, scratch: Path) -> dict[str, Workload]:
    """What runs, by name; the mixture's trace is written to `scratch`."""
    source = TINY_WORKLOADS if options.tiny else WORKLOADS
    requests = (24, 8, 24) if options.tiny else (options.w1, options.w2, options.mixture)
    at_a_time = 8 if options.tiny else 72
    trace = mixture(scratch / "mixture.jsonl", requests[2], tiny=options.tiny)
    said = ("--workload", "trace", "--trace-file", str(trace), "--arrival", "closed")
    return {
        "w1": Workload(requests[0], source["w1"].at_a_time, source["w1"].options),
        "w2": Workload(requests[1], source["w2"].at_a_time, source["w2"].options),
        "mixture": Workload(requests[2], at_a_time, said),
    }


class Admin:
    """The router's admin API."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    def name(self, roles: tuple[str, ...]) -> None:
        """Give the workers these roles, and wait until they say so.

        Raises:
            RunFailedError: They did not, in DEADLINE_S.
        """
        for worker, role in zip(self._workers(), roles, strict=True):
            body = json.dumps({"role": role}).encode()
            urllib.request.urlopen(f"{self._url}/workers/{worker['id']}/role", body).close()
        until = time.monotonic() + DEADLINE_S
        while tuple(worker["role"] for worker in self._workers()) != roles:
            if time.monotonic() > until:
                raise RunFailedError(f"after {DEADLINE_S:g} s the workers' roles are not {roles}")
            time.sleep(0.05)

    def _workers(self) -> list[dict[str, Any]]:
        with urllib.request.urlopen(f"{self._url}/workers") as answer:
            found: list[dict[str, Any]] = json.load(answer)["workers"]
        return sorted(found, key=lambda worker: worker["id"])


def free_port() -> int:
    """One that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """By workload: each naming's median of output tokens a second, as a share of the best."""
    found: dict[str, Any] = {}
    for workload in dict.fromkeys(run["workload"] for run in runs):
        rates: dict[str, float] = {}
        for name in NAMES:
            of_name = [r for r in runs if (r["workload"], r["naming"]) == (workload, name)]
            if of_name:
                rates[name] = statistics.median(r["output_throughput"] for r in of_name)
        best = max(rates.values())
        found[workload] = {
            name: {"output_tokens_per_s": rate, "of_best": rate / best}
            for name, rate in rates.items()
        }
    return found


def measured(options: argparse.Namespace, scratch: Path) -> list[dict[str, Any]]:
    """All runs that fit into the limit."""
    until = time.monotonic() + options.limit_s
    model = write_model(scratch / "model", TINY if options.tiny else SHAPES["qwen3-4b"])
    loads = workloads(options, scratch)
    port = free_port()
    serve = {"model": model, "device": options.device, "load-format": "dummy", "admin-port": port}
    server = Serving(Topology(0, 0, 2), serve, scratch / "serve.log")
    runs: list[dict[str, Any]] = []
    try:
        admin = Admin(port)

        def run(workload: str, load: Workload, seed: int) -> dict[str, float]:
            out = scratch / f"{workload}.json"
            said = {"label": workload, "seed": seed, "out": out, "warmup": WARMUP}
            return measure(server.url, server.model, model, load, **said)

        for workload, load in loads.items():  # warm, and what is learnt from steps is learnt
            few = Workload(min(load.requests, 2 * load.at_a_time), load.at_a_time, load.options)
            run(workload, few, seed=999)
        seed = 0
        for number in range(options.rounds):
            for workload, load in loads.items():
                names = list(NAMES)
                for naming in names[number:] + names[:number]:
                    if time.monotonic() > until:
                        return runs
                    seed += 1
                    admin.name(NAMES[naming])
                    row = run(workload, load, seed)
                    runs.append({"round": number, "workload": workload, "naming": naming, **row})
                    print(json.dumps(runs[-1]), flush=True)
                write(options, runs)
    finally:
        server.stop()
    return runs


def write(options: argparse.Namespace, runs: list[dict[str, Any]]) -> None:
    """The result file, as far as it goes."""
    model = "tiny" if options.tiny else "qwen3-4b-shape"
    result = header("role_names", label="roles", topology=None, model=model)
    write_result(options.out, {**result, "runs": runs, "summary": summary(runs)})


def arguments() -> argparse.ArgumentParser:
    """Of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--w1", type=int, default=400, help="requests of W1 in a run")
    parser.add_argument("--w2", type=int, default=120, help="requests of W2 in a run")
    parser.add_argument("--mixture", type=int, default=300, help="requests of both in a run")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and few requests")
    parser.add_argument("--limit-s", type=float, default=1_200, help="begin no run after this time")
    parser.add_argument("--out", type=Path, default=RESULT)
    return parser


def main() -> None:
    """Measure, print, write the result."""
    options = arguments().parse_args()
    with tempfile.TemporaryDirectory(prefix="tasuki-roles-") as scratch:
        runs = measured(options, Path(scratch))
    write(options, runs)
    print(json.dumps(summary(runs), indent=1))
    print(f"written: {options.out}")


if __name__ == "__main__":
    main()
