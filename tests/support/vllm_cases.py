"""Fleets of real vLLM servers with a fault in each, and healthy ones, for `tasuki doctor`.

`benchmarks/doctor.py --vllm` runs them. Faults that a CPU cannot have are not here: its attention
takes one KV layout, and vLLM does not show by which way KV travels.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.fleet_cases import (
    BURSTS,
    LONG_ANSWERS,
    STEADY,
    WINDOW_S,
    Case,
    Load,
    run_doctor,
    slowed,
)
from support.vllm_fleet import KV_LEASE_S, Server, VllmFleet
from support.waiting import until

VllmCase = Case[VllmFleet]

_ASK = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
_EXPIRED = "vllm:nixl_num_kv_expired_reqs_total"
_TOKENS = "vllm:prompt_tokens_total"
_LATE = "vllm:nixl_num_notifications_after_expiry_total"


@dataclass(frozen=True)
class VllmCases:
    """A fleet, and the states that it is brought into one after the other."""

    name: str
    servers: Sequence[Server]
    cases: Sequence[VllmCase]

    @contextlib.contextmanager
    def running(self, vllm: Path, model: Path, folder: Path) -> Iterator[VllmFleet]:
        """The fleet, from its start to its end."""
        fleet = VllmFleet.launch(vllm, model, folder, self.servers)
        try:
            yield fleet
        finally:
            fleet.destroy()


def look_at_vllm(fleet: VllmFleet, case: VllmCase) -> dict[str, Any]:
    """`tasuki doctor` at the router and its servers, or at some servers alone."""
    command = ["doctor", *(fleet.address(name) for name in case.seen)]
    if not case.seen:  # the router says where its servers are
        command += [fleet.url, "--admin", fleet.admin]
    command += ["--json", "--window-s", str(WINDOW_S), *case.arguments]
    return run_doctor(command)


@contextlib.contextmanager
def nobody(fleet: VllmFleet) -> Iterator[None]:
    """No clients, and no KV that waits for a decode server."""
    names = [server.name for server in fleet.servers]
    until(
        lambda: not any(fleet.metric(name, "vllm:kv_cache_usage_perc") for name in names),
        "servers that hold no KV",
        deadline_s=2 * KV_LEASE_S,
        interval_s=0.2,
    )
    yield


@contextlib.contextmanager
def just_served(fleet: VllmFleet) -> Iterator[None]:
    """A burst has ended a moment ago."""
    with BURSTS.on(fleet):
        pass
    yield


def prefill(fleet: VllmFleet, tokens: int, seed: object) -> tuple[list[int], Mapping[str, Any]]:
    """A prompt whose KV the prefill server keeps for decode, and the ticket for it."""
    draw = random.Random(f"{seed} {time.time_ns()}")
    prompt = [draw.randrange(3, 500) for _ in range(tokens)]
    body = {"prompt": prompt, "max_tokens": 1, "kv_transfer_params": _ASK}
    ticket = fleet.post("prefill", body).get("kv_transfer_params")
    assert ticket, "no ticket"
    return prompt, ticket


@contextlib.contextmanager
def kv_that_nobody_reads(fleet: VllmFleet) -> Iterator[None]:
    """A router that forgets requests between prefill and decode, a moment ago."""
    for number in range(8):
        prefill(fleet, 1000, number)
    yield


@contextlib.contextmanager
def expired(fleet: VllmFleet) -> Iterator[None]:
    """The same, after the lease."""
    before = fleet.metric("prefill", _EXPIRED)
    prefill(fleet, 1000, "expired")
    until(
        lambda: fleet.metric("prefill", _EXPIRED) > before,
        lambda: "KV to expire",
        deadline_s=4 * KV_LEASE_S,
        interval_s=0.5,
    )
    yield


@contextlib.contextmanager
def read_too_late(fleet: VllmFleet) -> Iterator[None]:
    """Decode stands still with requests in its hands until their leases have ended."""
    tickets = [prefill(fleet, 400, number) for number in range(4)]
    before = fleet.metric("prefill", _LATE)
    fleet.stop_process("decode")
    with ThreadPoolExecutor(len(tickets)) as pool:
        try:
            for prompt, ticket in tickets:
                body = {"prompt": prompt, "max_tokens": 4, "kv_transfer_params": ticket}
                pool.submit(fleet.post, "decode", body)
            time.sleep(KV_LEASE_S + 5)
        finally:
            fleet.continue_process("decode")

    def counted() -> bool:
        fleet.post("prefill", {"prompt": [5] * 8, "max_tokens": 1})  # idle, it hears of no reads
        return fleet.metric("prefill", _LATE) > before

    until(counted, lambda: "a read after expiry", interval_s=0.5)
    yield


@contextlib.contextmanager
def tickets_dropped(fleet: VllmFleet) -> Iterator[None]:
    """A router that runs both legs and does not pass prefill's ticket on."""
    end = threading.Event()

    def ask(number: int) -> None:
        while not end.is_set():
            prompt, _ = prefill(fleet, 300, number)
            fleet.post("decode", {"prompt": prompt, "max_tokens": 8})
            end.wait(0.1)

    threads = [threading.Thread(target=ask, args=(number,), daemon=True) for number in range(2)]
    for thread in threads:
        thread.start()
    time.sleep(3)
    try:
        yield
    finally:
        end.set()
        for thread in threads:
            thread.join(60)


@contextlib.contextmanager
def decode_gone(fleet: VllmFleet) -> Iterator[None]:
    """The decode server is killed."""
    fleet.kill("decode")
    time.sleep(2)
    yield


def used_up(load: Load) -> Callable[[VllmFleet], AbstractContextManager[None]]:
    """Clients ask after others have used each block of the small pools."""

    @contextlib.contextmanager
    def act(fleet: VllmFleet) -> Iterator[None]:
        with load.on(fleet):
            before = fleet.metric("decode", _TOKENS)
            until(lambda: fleet.metric("decode", _TOKENS) > before + 30_000, "30,000 tokens")
            yield

    return act


def round_robin(load: Load) -> Callable[[VllmFleet], AbstractContextManager[None]]:
    """Clients go to a router that takes servers in turn."""

    @contextlib.contextmanager
    def act(fleet: VllmFleet) -> Iterator[None]:
        if len(fleet.routers) == 1:
            fleet.route("--policy", "round-robin")
        with load.on(fleet):
            yield

    return act


REPEATED = Load(3, 600, 4, 60)
# So few that they are used up soon: blocks that were never used lie side by side, and NIXL joins
# their transfers.
_SMALL_BLOCKS = ("--block-size", "32", "--num-gpu-blocks-override", "256")

ALL: Sequence[VllmCases] = (
    VllmCases(
        "vLLM, 1 prefill, 1 decode",
        (Server("prefill", "prefill"), Server("decode", "decode")),
        (
            VllmCase("vLLM split, idle", nobody),
            VllmCase("vLLM split, steady", STEADY.on),
            VllmCase("vLLM split, bursts", BURSTS.on),
            VllmCase("vLLM split, long answers", LONG_ANSWERS.on),
            VllmCase("vLLM split, long prompts", Load(1, 2000, 8, pause_s=0.3).on),
            VllmCase("vLLM split, prompts that repeat", REPEATED.on),
            VllmCase("vLLM split, a burst just ended", just_served),
            VllmCase(
                "vLLM split, prompts only",
                # More than a server runs at once, so that some wait.
                Load(24, 3000, 2, pause_s=0.0).on,
                "ratio",
                (),
                ("--no-probes",),
                "wait for prefill",
            ),
            VllmCase("KV that nobody reads", kv_that_nobody_reads, "stranded KV", ("lost KV",)),
            VllmCase("KV expired", expired, "lost KV", ("stranded KV",), says="expired"),
            VllmCase(
                "tickets not passed on",
                tickets_dropped,
                "recomputed prompts",
                ("lost KV", "stranded KV"),
                says="again",
            ),
            VllmCase(
                "KV read after it expired",
                read_too_late,
                "lost KV",
                ("recomputed prompts", "errors"),
                says="freed",
            ),
            VllmCase(
                "decode server gone",
                decode_gone,
                "workers",
                ("lost KV", "recomputed prompts", "errors"),
            ),
        ),
    ),
    VllmCases(
        "vLLM, 2 colocated",
        (Server("a", connector=False), Server("b", connector=False)),
        (
            VllmCase("vLLM colocated, idle", nobody),
            VllmCase("vLLM colocated, steady", STEADY.on),
            VllmCase("vLLM colocated, bursts", BURSTS.on),
            VllmCase("vLLM colocated, long answers", LONG_ANSWERS.on),
            VllmCase("vLLM colocated, prompts that repeat", REPEATED.on),
            VllmCase("one vLLM server slow", slowed("b"), "slow worker"),
            VllmCase("vLLM round robin, prompts never repeat", round_robin(STEADY)),
            VllmCase(
                "vLLM round robin, prompts that repeat", round_robin(REPEATED), "prefix cache"
            ),
        ),
    ),
    VllmCases(
        "vLLM, lengths and blocks differ",
        (
            Server("prefill", "prefill"),
            Server("short", "decode", ("--max-model-len", "3072")),
            Server("blocks", "decode", ("--block-size", "64")),
        ),
        (
            VllmCase(
                "vLLM max model len differs",
                nobody,
                "configuration",
                says="max_model_len",
                seen=("prefill", "short"),
            ),
            VllmCase(
                "vLLM block size differs",
                nobody,
                "configuration",
                ("recomputed prompts", "lost KV", "errors"),
                says="block_size",
                seen=("prefill", "blocks"),
            ),
        ),
    ),
    VllmCases(
        "vLLM, dtypes and names differ",
        (
            Server("prefill", "prefill"),
            Server("float", "decode", ("--dtype", "float32")),
            Server("other", "decode", ("--served-model-name", "another")),
        ),
        (
            VllmCase(
                "vLLM served name differs",
                nobody,
                "configuration",
                ("recomputed prompts", "errors"),
                says="no peer",
                seen=("prefill", "other"),
            ),
            VllmCase(
                "vLLM dtype differs",
                nobody,
                "recomputed prompts",
                ("lost KV", "errors", "stranded KV"),
                seen=("prefill", "float"),
            ),
        ),
    ),
    VllmCases(
        "vLLM, small blocks",  # of 4 KiB a layer
        (
            Server("prefill", "prefill", _SMALL_BLOCKS),
            Server("decode", "decode", _SMALL_BLOCKS),
            Server("alone", "prefill", _SMALL_BLOCKS, connector=False, routed=False),
        ),
        (
            VllmCase(
                "prefill without a connector",
                nobody,
                "recomputed prompts",
                ("lost KV",),
                says="hands no KV over",
                seen=("alone", "decode"),
            ),
            VllmCase(
                "KV moves by kilobytes", used_up(Load(2, 800, 8)), "KV layout", says="at a time"
            ),
        ),
    ),
)
