"""A prefill worker dies with KV that decode workers have asked for and not read.

Nobody listens at its address any more, so they do not wait for its lease to run out. The lease is
longer than the test takes on a busy machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.crowd import Crowd
from support.deployment import Deployment, Options
from support.reference import Reference
from support.waiting import until

pytestmark = pytest.mark.faults
LEASE_S = 80.0


@pytest.fixture(params=[1, 2], ids=["1+1", "2+2"])
def system(
    request: pytest.FixtureRequest, tiny_model: Path, deploy: Callable[[Options], Deployment]
) -> Deployment:
    memory = ("--kv-memory", "50000000", "--max-batched-tokens", "256")
    worker = (*memory, "--lease-s", f"{LEASE_S:g}")
    return deploy(
        Options(
            tiny_model,
            prefill=request.param,
            decode=request.param,
            worker=worker,
            router=("--no-admission",),  # requests wait at the workers, however slow prompts are
        )
    )


def open_streams(system: Deployment, references: list[Reference]) -> None:
    """Requests between all pairs of workers: a stream cannot be opened to a frozen one.

    Their prompts are none of the references': decode workers would hold their KV already.
    """
    ask = system.http.complete
    prompts = [reference.prompt_tokens[::-1] for reference in references]
    system.gather([lambda p=prompt: ask(p, max_tokens=2) for prompt in prompts])
    system.wait_quiet()


def hold_handoffs(system: Deployment, references: list[Reference]) -> Crowd:
    """A crowd whose decode workers sleep, after they asked for the KV of all of it."""
    crowd = Crowd(system, references)
    prefill = system.names_of("prefill")
    for name in prefill:
        system.stop_process(name)
    try:
        crowd.start()
        until(
            lambda: system.total("waiting", "decode") == len(references),
            lambda: f"requests that wait for their KV\n{system.logs()}",
        )
        for name in system.names_of("decode"):
            system.stop_process(name)
    finally:
        for name in prefill:
            system.continue_process(name)
    return crowd


@pytest.mark.parametrize(
    "with_token",
    [pytest.param(1, marks=pytest.mark.long), 8, pytest.param(16, marks=pytest.mark.long)],
)
def test_prefill_after_first_tokens(
    system: Deployment, sixteen: list[Reference], with_token: int
) -> None:
    open_streams(system, sixteen)
    crowd = hold_handoffs(system, sixteen)
    try:
        crowd.wait_received(requests=with_token, tokens=1)
        held = system.stop_at_work("prefill-0", "leased_blocks")
        before = system.retries()
        system.kill("prefill-0")
    finally:
        for name in system.names_of("decode"):
            system.continue_process(name)
    continued_s = time.monotonic()
    answers = crowd.finish()
    assert time.monotonic() - continued_s < LEASE_S / 2
    assert sum(each.timings["replacements"] for each in answers if each.timings) > 0, held
    assert system.retries() > before
