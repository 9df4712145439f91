"""Real vLLM servers on this machine's CPU, and a router of Tasuki before them.

Each server is a process group, bound to one core, with a small model. It takes a minute to start.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.metrics import Metrics
from support.processes import Process
from support.waiting import free_port, until

MODEL_NAME = "test-model"
KV_LEASE_S = 20
_START_DEADLINE_S = 400.0


@dataclass(frozen=True)
class Server:
    """One of a fleet.

    Attributes:
        role: `prefill`, `decode`, or empty: it serves requests alone.
        words: Of `vllm serve`, after the usual ones, of which the last counts.
        connector: Whether it has a NixlConnector.
        routed: Whether the router has it.
    """

    name: str
    role: str = ""
    words: tuple[str, ...] = ()
    connector: bool = True
    routed: bool = True


@dataclass
class VllmFleet:
    """Begins with `launch`.

    Attributes:
        url: Of the router.
        admin: Of its admin API, `host:port`.
        model: As requests call it.
    """

    servers: Sequence[Server]
    folder: Path
    ports: dict[str, int] = field(default_factory=dict)
    processes: dict[str, Process] = field(default_factory=dict)
    routers: list[Process] = field(default_factory=list)
    url: str = ""
    admin: str = ""
    model: str = MODEL_NAME

    @classmethod
    def launch(cls, vllm: Path, model: Path, folder: Path, servers: Sequence[Server]) -> VllmFleet:
        """Starts the servers at once, and then a router.

        Args:
            vllm: The program.
            model: Folder of the model.
            folder: For logs.

        Raises:
            TimeoutError: A server does not start.
        """
        fleet = cls(servers, folder)
        try:
            for number, server in enumerate(servers):
                fleet._start(vllm, model, server, number)
            for server in servers:
                fleet.wait_healthy(server.name)
            fleet.route()
        except BaseException:
            fleet.destroy()
            raise
        return fleet

    def _start(self, vllm: Path, model: Path, server: Server, number: int) -> None:
        self.ports[server.name] = port = free_port()
        words = ["serve", str(model), "--served-model-name", MODEL_NAME, "--enforce-eager"]
        words += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16"]
        words += ["--max-num-seqs", "16", "--max-model-len", "4096"]
        words += ["--num-gpu-blocks-override", "512", "--enable-prompt-tokens-details"]
        if server.connector:
            connector = {
                "kv_connector": "NixlConnector",
                "kv_role": "kv_both",
                "kv_buffer_device": "cpu",
                "kv_connector_extra_config": {"kv_lease_duration": KV_LEASE_S},
            }
            words += ["--kv-transfer-config", json.dumps(connector)]
        environment = {
            "CUDA_VISIBLE_DEVICES": "",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": str(number % (os.cpu_count() or 1)),
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
            "VLLM_NO_USAGE_STATS": "1",
            "UCX_NET_DEVICES": "lo",
        }
        variables = [f"{name}={value}" for name, value in environment.items()]
        program = [shutil.which("env") or "env", "-u", "PYTHONPATH", *variables, str(vllm)]
        process = Process(server.name, [*words, *server.words], self._log(server.name), (), program)
        self.processes[server.name] = process
        process.start()

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def wait_healthy(self, name: str) -> None:
        """Until a server answers, or has ended."""

        def answers() -> bool:
            process = self.processes[name]
            if process.exit_code() is not None:
                raise RuntimeError(f"{name} ended:\n{process.tail()}")
            return self.get(name, "/health") is not None

        tail = self.processes[name].tail
        until(answers, lambda: f"{name}\n{tail()}", deadline_s=_START_DEADLINE_S, interval_s=0.5)

    def route(self, *words: str) -> None:
        """Puts a (further) router before all servers; clients go to the newest."""
        admin = free_port()
        arguments = ["router", "--host", "127.0.0.1", "--port", "0", "--readiness-grace-s", "0"]
        arguments += ["--admin-port", str(admin), *words]
        routed = [self.address(server.name) for server in self.servers if server.routed]
        arguments += ["--worker", *routed]
        router = Process("router", arguments, self._log(f"router-{len(self.routers)}"))
        self.routers.append(router)
        router.start()
        self.url = router.wait_for_line("listening on ", deadline_s=60.0)
        self.admin = f"127.0.0.1:{admin}"

        def known() -> bool:
            with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as answer:
                metrics = Metrics(answer.read().decode())
            return sum(s.value for s in metrics.find("tasuki_worker_up")) == len(routed)

        until(known, lambda: f"the router to know its workers\n{router.tail()}")

    def address(self, name: str) -> str:
        """As routers and `tasuki doctor` take it."""
        role = next(server.role for server in self.servers if server.name == name)
        return f"vllm://127.0.0.1:{self.ports[name]}" + (f"?role={role}" if role else "")

    def get(self, name: str, path: str) -> str | None:
        """What a server answers; None: nothing, or no success."""
        try:
            url = f"http://127.0.0.1:{self.ports[name]}{path}"
            with urllib.request.urlopen(url, timeout=10) as answer:
                return str(answer.read().decode())
        except OSError:
            return None

    def post(self, name: str, body: dict[str, Any], wait_s: float = 120.0) -> dict[str, Any]:
        """A completion of a server, asked directly; empty if it fails."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.ports[name]}/v1/completions",
            json.dumps(
                {"model": MODEL_NAME, "temperature": 0, "ignore_eos": True, **body}
            ).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=wait_s) as answer:
                return dict(json.loads(answer.read()))
        except OSError:
            return {}

    def metric(self, name: str, metric: str, **labels: str) -> float:
        """A sum of samples of a server."""
        return Metrics(self.get(name, "/metrics") or "").sum(metric, **labels)

    def stop_process(self, name: str) -> None:
        """SIGSTOP to a server and its children."""
        os.killpg(self.processes[name].pid, signal.SIGSTOP)

    def continue_process(self, name: str) -> None:
        """SIGCONT to all of it."""
        os.killpg(self.processes[name].pid, signal.SIGCONT)

    def kill(self, name: str) -> None:
        """Ends a server at once."""
        self.processes[name].kill()

    def destroy(self) -> None:
        """Ends all."""
        for process in [*self.routers, *self.processes.values()]:
            process.kill()
