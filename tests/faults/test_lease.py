"""A decode worker that sleeps past its lease does not use what was its own.

Its pool on the prefill side is overwritten by other prompts meanwhile, so a
late read would show in the tokens.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.client import AnswerError
from support.crowd import Crowd
from support.deployment import Deployment, Options
from support.models import VOCAB_SIZE
from support.reference import Reference
from support.waiting import until
from support.workload import known_requests

pytestmark = pytest.mark.faults

LEASE_S = 1.0


def overwrite_pool(system: Deployment, tokens: int) -> None:
    """Prompts that run on the prefill worker alone and take every free block in turn."""
    draw = random.Random(3)
    for _ in range(-(-tokens // 800)):
        prompt = [draw.randrange(3, VOCAB_SIZE) for _ in range(800)]
        system.http.complete(prompt, max_tokens=1)


def test_decode_stopped_past_its_lease(
    tiny_model: Path, deploy: Callable[[Options], Deployment], sixteen: list[Reference]
) -> None:
    system = deploy(leased(tiny_model))
    pool_tokens = 16 * int(system.total("total_blocks", "prefill"))
    before = system.total("leases_expired_total", "prefill")

    crowd = Crowd(system, sixteen).start()
    crowd.wait_received(requests=1, tokens=1)
    system.stop_process("decode-0")
    try:
        until(
            lambda: system.total("leases_expired_total", "prefill") > before,
            lambda: f"a lease that expires\n{system.logs()}",
        )
        overwrite_pool(system, 2 * pool_tokens)
    finally:
        system.continue_process("decode-0")
    crowd.finish()
    system.wait_idle()


def test_prefill_stopped_past_its_lease(
    tiny_model: Path, deploy: Callable[[Options], Deployment], sixteen: list[Reference]
) -> None:
    """The other side sleeps: renewals go unanswered, decode may not trust what it pulled."""
    system = deploy(leased(tiny_model))
    crowd = Crowd(system, sixteen).start()
    crowd.wait_received(requests=1, tokens=1)
    pause(system, "prefill-0")
    crowd.finish()
    system.wait_idle()


def test_operator_may_prefer_failure_to_recomputing(
    tiny_model: Path, deploy: Callable[[Options], Deployment]
) -> None:
    """`--on-kv-loss fail`: what lost its KV fails and says so, the rest is right.

    Decode sleeps while prefill streams first tokens, so that their KV is not
    there yet; it wakes past its lease with nobody to ask. All prompts are long,
    so that prefill goes on for a second or two after the first of those tokens,
    and decode has room for all, so that prefill need not ask. A machine may
    still be too busy to notice in time that it began: hence the tries.
    """
    system = deploy(leased(tiny_model, "--on-kv-loss", "fail", pool_bytes=64_000_000))
    for seed in range(5):
        # New prompts each time: what is cached is not handed over slowly.
        long = known_requests(tiny_model, 16, prompt_lengths=(600,), steps=200, seed=seed)
        failures = lose_kv(system, long)
        if failures:
            break
    assert failures
    for failure in failures:
        assert isinstance(failure, AnswerError)
        assert "KV" in failure.message
        assert "127.0.0.1" not in str(failure)
    system.wait_idle()


def leased(model: Path, *router: str, pool_bytes: int = 16_000_000) -> Options:
    """1 + 1 with a short lease and small steps, so that handoffs take a while."""
    steps = ("--max-batched-tokens", "16")
    worker = ("--kv-memory", str(pool_bytes), *steps, "--lease-s", str(LEASE_S))
    return Options(model, prefill=1, decode=1, worker=worker, router=router)


def lose_kv(system: Deployment, references: list[Reference]) -> list[BaseException]:
    """Requests whose prefill worker falls silent after the first token; returns what failed."""
    crowd = Crowd(system, references).start()
    crowd.wait_received(requests=1, tokens=1)
    system.stop_process("decode-0")
    try:
        crowd.wait_received(requests=min(crowd.begun() + 3, len(references)), tokens=1)
        system.stop_process("prefill-0")
        time.sleep(1.5 * LEASE_S)
    finally:
        system.continue_process("decode-0")
    try:
        time.sleep(2 * LEASE_S)
    finally:
        system.continue_process("prefill-0")
    answers, failures = crowd.outcomes()
    print(f"{len(answers)} answered, {len(failures)} failed")
    return failures


def pause(system: Deployment, name: str) -> None:
    """SIGSTOP for four leases. The pause is the fault itself, not a synchronisation."""
    system.stop_process(name)
    try:
        time.sleep(4 * LEASE_S)
    finally:
        system.continue_process(name)
