"""W1 and W2 (w1_w2.py) on `tasuki serve`, in several topologies.

    python benchmarks/gpu/serve_w1_w2.py                         2 GPUs
    python benchmarks/gpu/serve_w1_w2.py --topologies 1mixed     1 GPU
    python benchmarks/gpu/serve_w1_w2.py --topologies tp2        2 GPUs, one worker
    python benchmarks/gpu/serve_w1_w2.py --shape llama-3-8b --sampled
    python benchmarks/gpu/serve_w1_w2.py --tiny --device cpu     the same code on any machine

Random weights (`--load-format dummy`) in the shape of a known model. `1p1d` has strict
roles: every request is handed over. In the other topologies roles are preferences.
`benchmarks/peers` loads vLLM in the same way.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import signal
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil
from shapes import SHAPES, TINY, write_model
from w1_w2 import TINY_WORKLOADS, WORKLOADS, measure, medians, show

from tasuki.bench.errors import RunFailedError
from tasuki.bench.header import header, write_result
from tasuki.bench.serving import Serving
from tasuki.launch.config import Topology

REPOSITORY = Path(__file__).resolve().parents[2]
RESULT = REPOSITORY / "benchmarks" / "results" / "serve_w1_w2.json"
TOPOLOGIES = {
    "1p1d": Topology(1, 1, 0),
    "1p1d-soft": Topology(1, 1, 0),
    "1p1mixed": Topology(1, 0, 1),
    "1mixed1d": Topology(0, 1, 1),
    "2mixed": Topology(0, 0, 2),
    "1mixed": Topology(0, 0, 1),
    "tp2": Topology(0, 0, 1),
}
OPTIONS: dict[str, dict[str, Any]] = {  # of `tasuki serve`, by topology
    "1p1d": {"strict-roles": True},
    "tp2": {"tp-mixed": 2},
}
SAMPLED = ("--temperature", "0.7", "--extra-body", '{"top_p": 0.9}')


def phases_of(log: Path) -> list[str]:
    """How long each worker's start took, in its own words."""
    found = re.findall(r"worker=(\S+) .*(started in .*)", log.read_text(errors="replace"))
    return [f"{worker} {account}" for worker, account in found]


class Campaign:
    """What is run, and what came of it.

    Attributes:
        starts: By topology, each worker's name and its account of its start.
        runs: Each run's figures.
        failures: What went wrong, one line each; the logs are printed only.
        out_of_time: The limit is over.
    """

    def __init__(self, arguments: argparse.Namespace, scratch: Path) -> None:
        self._arguments = arguments
        self._scratch = scratch
        self._workloads = TINY_WORKLOADS if arguments.tiny else WORKLOADS
        shape = TINY if arguments.tiny else SHAPES[arguments.shape]
        self.model_name = f"{arguments.shape}-shape"
        self._model = write_model(scratch / self.model_name, shape)
        self.starts: dict[str, list[str]] = {}
        self.runs: list[dict[str, Any]] = []
        self.failures: list[str] = []
        self.out_of_time = False
        self._server: Serving | None = None

    def run(self, topology: str, options: dict[str, Any]) -> None:
        """All workloads on one topology; what fails is kept for the end."""
        log = self._scratch / f"{topology}.log"
        try:
            said = {"model": self._model, **options, **OPTIONS.get(topology, {})}
            server = Serving(TOPOLOGIES[topology], said, log)
            self._server = server
            try:
                self.starts[topology] = phases_of(log)
                print(*(f"{topology}: {start}" for start in self.starts[topology]), sep="\n")
                for name in self._arguments.workloads:
                    for repeat in range(self._arguments.repeats):
                        self._measure(server, topology, name, repeat)
            finally:
                server.stop()
        except RunFailedError as error:
            lines = log.read_text(errors="replace").splitlines(keepends=True)
            end = "".join(line for line in lines if "request ended" not in line)[-14000:]
            print(f"{topology}: {error}\n{end}", flush=True)
            self.failures.append(f"{topology}: {str(error).splitlines()[0]}")

    def give_up(self, *_: object) -> None:
        """A signal's handler: tell where the workers are, and fail what runs.

        Raises:
            RunFailedError: Always.
        """
        self.out_of_time = True
        if self._server is not None:
            try:
                with urllib.request.urlopen(f"{self._server.url}/metrics", timeout=2) as answer:
                    lines = answer.read().decode().splitlines()
                told = ("output_tokens_total", "steps_total", "running", "waiting", "decode_step")
                print(*(x for x in lines if x[0] != "#" and any(t in x for t in told)), sep="\n")
            except OSError as error:
                print(f"no metrics: {error}")
            for child in psutil.Process().children(recursive=True):  # PYTHONFAULTHANDLER: stacks
                if {"worker", "tasuki.worker.rank_process"} & set(child.cmdline()):
                    child.send_signal(signal.SIGABRT)
            time.sleep(2.0)
        raise RunFailedError("the time that --limit-s gives is over")

    def tables(self) -> dict[str, dict[str, dict[str, float]]]:
        """Medians over the repeats, by workload and topology."""
        found: dict[str, dict[str, dict[str, float]]] = {n: {} for n in self._arguments.workloads}
        for name, table in found.items():
            for topology in self._arguments.topologies:
                rows = [r for r in self.runs if (r["workload"], r["topology"]) == (name, topology)]
                if rows:
                    table[f"tasuki {topology}"] = medians(rows)
        return found

    def write(self, options: dict[str, Any]) -> None:
        """The result file, as far as it goes.

        Args:
            options: Of `tasuki serve`, for all topologies.
        """
        result = header("w1_w2", label="w1_w2", topology=None, model=self.model_name)
        result |= {"serve": options, "starts": self.starts, "runs": self.runs}
        result |= {"medians": self.tables(), "failures": self.failures}
        write_result(self._arguments.out, result)

    def _measure(self, server: Serving, topology: str, name: str, repeat: int) -> None:
        folder = self._arguments.keep or self._scratch
        out = folder / f"{topology}-{name}-{repeat}.json"
        label = f"{topology} {name}"
        row = measure(
            server.url,
            server.model,
            self._model,
            self._workloads[name],
            label=label,
            seed=repeat,
            out=out,
            sampling=SAMPLED if self._arguments.sampled else (),
        )
        if ended := server.ended():
            raise RunFailedError(ended)
        self.runs.append({"topology": topology, "workload": name, **row})
        print(json.dumps(self.runs[-1]), flush=True)


def main() -> int:
    """Measure, print, write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--topologies", nargs="+", choices=TOPOLOGIES, default=["1p1d", "2mixed"])
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=["w1", "w2"])
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-4b")
    parser.add_argument("--sampled", action="store_true", help="temperature 0.7, top-p 0.9")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and few requests")
    parser.add_argument("--serve", default="", help="more options of `tasuki serve`, quoted")
    parser.add_argument(
        "--limit-s", type=int, default=0, help="give up then, with stacks; 0: never"
    )
    parser.add_argument("--keep", type=Path, help="folder for the result file of each run")
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    options: dict[str, Any] = {"device": arguments.device, "load-format": "dummy"}
    more = shlex.split(arguments.serve)
    for flag, value in zip(more[::2], more[1::2], strict=True):
        options[flag.removeprefix("--")] = value
    if arguments.keep:
        arguments.keep.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="tasuki-w1-w2-") as scratch:
        campaign = Campaign(arguments, Path(scratch))
        signal.signal(signal.SIGALRM, campaign.give_up)
        signal.alarm(arguments.limit_s)
        for topology in arguments.topologies:
            if not campaign.out_of_time:
                campaign.run(topology, options)
                campaign.write(options)  # what is measured outlives what comes after it
    for name, table in campaign.tables().items():
        show(name, table)
    print(f"written: {arguments.out}")
    return 1 if campaign.failures else 0


if __name__ == "__main__":
    sys.exit(main())
