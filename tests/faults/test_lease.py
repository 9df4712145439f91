"""A decode worker that sleeps past its lease does not use what was its own.

Its pool on the prefill side is overwritten by other prompts meanwhile, so a
late read would show in the tokens.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.client import AnswerError
from support.crowd import Crowd
from support.deployment import Deployment, Options
from support.models import VOCAB_SIZE
from support.pace import Pace
from support.reference import Reference
from support.waiting import until

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

    crowd = stop_decode_between(system, sixteen)
    try:
        until(
            lambda: system.total("leases_expired_total", "prefill") > before,
            lambda: f"a lease that expires\n{system.logs()}",
        )
        overwrite_pool(system, 2 * pool_tokens)
    finally:
        system.continue_process("decode-0")
    answers = crowd.finish()
    assert any(answer.timings and answer.timings["replacements"] for answer in answers)
    system.check_idle()


def test_prefill_stopped_past_its_lease(
    tiny_model: Path,
    deploy: Callable[[Options], Deployment],
    sixteen: list[Reference],
    pace: Pace,
) -> None:
    """The other side sleeps: renewals go unanswered, decode may not trust what it pulled."""
    system = deploy(replace(leased(tiny_model), modules=pace.modules("prefill-0")))
    with pace.slow("prefill"):
        crowd = Crowd(system, sixteen).start()
        system.stop_at_work("prefill-0", "leased_blocks")
    before = system.retries()
    until(lambda: system.retries() > before, lambda: f"KV given up\n{system.logs()}")
    system.continue_process("prefill-0")
    answers = crowd.finish()
    assert any(answer.timings and answer.timings["replacements"] for answer in answers)
    system.check_idle()


def test_operator_may_prefer_failure_to_recomputing(
    tiny_model: Path, deploy: Callable[[Options], Deployment], sixteen: list[Reference]
) -> None:
    """`--on-kv-loss fail`: what lost its KV fails and says so, the rest is right.

    Decode sleeps while prefill streams first tokens, so that their KV is not
    there; it wakes past its lease with nobody to ask.
    """
    system = deploy(leased(tiny_model, "--on-kv-loss", "fail"))
    crowd = stop_decode_between(system, sixteen)
    try:
        crowd.wait_received(requests=1, tokens=1)
        system.stop_process("prefill-0")
        time.sleep(1.5 * LEASE_S)  # the fault itself, not a synchronisation
    finally:
        system.continue_process("decode-0")
    try:
        until(lambda: crowd.failed() > 0, lambda: f"a failure\n{system.logs()}")
    finally:
        system.continue_process("prefill-0")
    _, failures = crowd.outcomes()
    assert failures
    for failure in failures:
        assert isinstance(failure, AnswerError)
        assert "KV" in failure.message
        assert "127.0.0.1" not in str(failure)
    system.check_idle()


def leased(model: Path, *router: str) -> Options:
    """1 + 1 with a short lease and small steps, so that handoffs take a while.

    Requests wait in the workers, also while one of these is stopped.
    """
    steps = ("--max-batched-tokens", "16")
    worker = ("--kv-memory", "10000000", *steps, "--lease-s", str(LEASE_S))
    return Options(model, prefill=1, decode=1, worker=worker, router=(*router, "--no-admission"))


def stop_decode_between(system: Deployment, references: list[Reference]) -> Crowd:
    """Decode has asked for the KV of these and sleeps when prefill begins with them.

    Prefill is held back meanwhile, on streams that one request before has opened,
    so that nothing depends on how soon anybody looks. That request's prompt is none of
    theirs: decode would hold its KV already.
    """
    system.http.complete(references[0].prompt_tokens[::-1], max_tokens=2)
    system.wait_idle()
    crowd = Crowd(system, references)
    system.stop_process("prefill-0")
    try:
        crowd.start()
        until(
            lambda: system.total("waiting", "decode") >= len(references) // 2,
            lambda: f"requests that wait for their KV\n{system.logs()}",
        )
        system.stop_process("decode-0")
    finally:
        system.continue_process("prefill-0")
    return crowd
