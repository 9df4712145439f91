"""W1 and W2 on vLLM: colocated, split over NIXL, tensor parallel, on two GPUs.

    python benchmarks/peers/serve_vllm.py --python VENV/bin/python
    python benchmarks/gpu/serve_w1_w2.py --topologies 1p1d 2mixed tp2

VENV holds `vllm` and `vllm-router`, outside the repository. Run both commands on the same
machine, one after the other: model folder, client, prompts, warm-up and sampling (greedy) are
the same. Prefix caching is off, as no prompt repeats. Colocated workers load no KV connector.
`--chunk` sets the peer's prefill chunk (max-num-batched-tokens); sweep it before you compare.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "gpu"))

from shapes import SHAPES, write_model  # noqa: E402
from w1_w2 import WORKLOADS, measure, medians, show  # noqa: E402

from tasuki.bench.errors import RunFailedError  # noqa: E402
from tasuki.bench.header import header, write_result  # noqa: E402

RESULT = HERE.parent / "results" / "peers_vllm.json"
NIXL = json.dumps({"kv_connector": "NixlConnector", "kv_role": "kv_both"})
NO_FUSED_SUMS = json.dumps({"pass_config": {"fuse_allreduce_rms": False}})
START_S, END_S = 300.0, 30.0
WORKER_PORTS, ROUTER_PORT, METRICS_PORT = (8100, 8200), 9000, 29200


class Server:
    """One process in a group of its own; ended, with its children, on exit."""

    def __init__(self, command: list[str], log: Path, environment: dict[str, str]) -> None:
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                command,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=os.environ | environment,
                start_new_session=True,
            )
        self._log = log

    def await_health(self, url: str) -> None:
        """Wait until `url` answers 200.

        Raises:
            RunFailedError: The process ended, or did not answer within START_S.
        """
        deadline_s = time.monotonic() + START_S
        while time.monotonic() < deadline_s and self._process.poll() is None:
            try:
                with urllib.request.urlopen(url, timeout=2):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        end = self._log.read_text(errors="replace")[-3000:]
        raise RunFailedError(f"{url} did not answer within {START_S:g} s:\n{end}")

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, number)
                self._process.wait(END_S)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue


def start(
    mode: str, arguments: argparse.Namespace, model: Path, scratch: Path, stack: ExitStack
) -> str:
    """Start vLLM in one mode; gives the URL to load."""
    serve = [arguments.python, "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
    serve += ["--load-format", "dummy", "--max-model-len", "8192", "--no-enable-prefix-caching"]
    serve += ["--served-model-name", model.name, "--max-num-seqs", "256"]
    serve += ["--gpu-memory-utilization", "0.85"]
    if arguments.chunk is not None:
        serve += ["--max-num-batched-tokens", str(arguments.chunk)]
    if mode == "tp2":
        words = ["--tensor-parallel-size", "2", "--compilation-config", NO_FUSED_SUMS]
        port = WORKER_PORTS[0]
        server = Server([*serve, *words, "--port", str(port)], scratch / "tp2.log", {})
        stack.enter_context(server).await_health(f"http://127.0.0.1:{port}/health")
        return f"http://127.0.0.1:{port}"
    connector = ["--kv-transfer-config", NIXL] if mode == "split" else []
    workers = []
    for gpu, port in enumerate(WORKER_PORTS):
        environment = {
            "CUDA_VISIBLE_DEVICES": str(gpu),
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(5600 + gpu),
        }
        command = [*serve, *connector, "--port", str(port)]
        server = Server(command, scratch / f"{mode}-{gpu}.log", environment)
        workers.append((stack.enter_context(server), f"http://127.0.0.1:{port}"))
    for server, url in workers:
        server.await_health(f"{url}/health")
    urls = [url for _, url in workers]
    router = [arguments.python, "-m", "vllm_router.launch_router", "--policy", "round_robin"]
    router += ["--port", str(ROUTER_PORT), "--prometheus-port", str(METRICS_PORT)]
    if mode == "split":
        router += ["--vllm-pd-disaggregation", "--kv-connector", "nixl"]
        router += ["--prefill", urls[0], "--decode", urls[1]]
    else:
        router += ["--worker-urls", *urls]
    url = f"http://127.0.0.1:{ROUTER_PORT}"
    stack.enter_context(Server(router, scratch / f"{mode}-router.log", {})).await_health(
        f"{url}/health"
    )
    return url


def main() -> int:
    """Measure, print, write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", required=True, help="interpreter that has vllm, vllm-router")
    parser.add_argument("--modes", nargs="+", choices=("colocated", "split", "tp2"))
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-4b")
    parser.add_argument("--chunk", type=int, help="max-num-batched-tokens of vLLM [its default]")
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    asked = "import vllm; print(vllm.__version__)"
    said = subprocess.run([arguments.python, "-c", asked], capture_output=True, text=True)
    if said.returncode != 0:
        parser.error(f"--python {arguments.python} has no vllm: {said.stderr[-300:]}")
    version = said.stdout.split()[-1]
    runs: list[dict[str, Any]] = []
    failures: list[str] = []
    tables: dict[str, dict[str, dict[str, float]]] = {name: {} for name in arguments.workloads}
    with tempfile.TemporaryDirectory(prefix="tasuki-peers-") as folder:
        scratch = Path(folder)
        model = write_model(scratch / f"{arguments.shape}-shape", SHAPES[arguments.shape])
        for mode in arguments.modes or ("colocated", "split", "tp2"):
            try:
                with ExitStack() as stack:
                    url = start(mode, arguments, model, scratch, stack)
                    for name in arguments.workloads:
                        rows = []
                        for seed in range(arguments.repeats):
                            rows.append(
                                measure(
                                    url,
                                    model.name,
                                    model,
                                    WORKLOADS[name],
                                    label=f"vllm {mode} {name}",
                                    seed=seed,
                                    out=scratch / "run.json",
                                )
                            )
                            runs.append({"system": f"vllm {mode}", "workload": name, **rows[-1]})
                        tables[name][f"vllm {mode}"] = medians(rows)
            except RunFailedError as error:
                failures.append(f"{mode}: {error}")
                print(failures[-1], file=sys.stderr)
    result = header("w1_w2", label="vllm", topology=None, model=f"{arguments.shape}-shape")
    result["command"] = [
        "VENV/bin/python" if word == arguments.python else word for word in result["command"]
    ]
    result |= {"vllm": version, "runs": runs, "medians": tables, "failures": failures}
    write_result(arguments.out, result)
    for name, table in tables.items():
        show(name, table)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
