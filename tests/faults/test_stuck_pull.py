"""A pull that never ends while its prefill worker lives: the request goes on without it.

The blocks stay in quarantine until the transfer ends, and `/metrics` tells of them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.client import AnswerError
from support.crowd import Crowd
from support.deployment import Deployment, Options
from support.faulty_worker import FAULT_LINE
from support.reference import Reference
from support.waiting import until

pytestmark = pytest.mark.faults

PULL_TIMEOUT_S = 2.0
REQUESTS = 4


def start(
    deploy: Callable[[Options], Deployment], model: Path, switch: Path, *router: str
) -> Deployment:
    """1 prefill + 1 decode, whose pulls hang while the switch is there."""
    worker = ("--kv-memory", "50000000", "--pull-timeout-s", f"{PULL_TIMEOUT_S:g}")
    module = ("support.faulty_worker", "pull", str(switch))
    return deploy(
        Options(
            model, prefill=1, decode=1, worker=worker, router=router, modules={"decode-0": module}
        )
    )


def timeouts(system: Deployment) -> float:
    return system.total("kv_pull_timeouts_total", "decode")


def until_returned(system: Deployment, switch: Path) -> None:
    """Lets the transfers end: every block comes back."""
    assert FAULT_LINE + "pull" in system.workers["decode-0"].process.output()
    assert system.total("stuck_blocks", "decode") > 0
    switch.unlink()
    until(lambda: system.total("stuck_blocks", "decode") == 0, "the blocks' return")
    system.check_idle()


def test_the_request_is_computed_again(
    tiny_model: Path,
    deploy: Callable[[Options], Deployment],
    short_ones: list[Reference],
    tmp_path: Path,
) -> None:
    switch = tmp_path / "switch"
    system = start(deploy, tiny_model, switch)
    switch.touch()
    answers = Crowd(system, short_ones[:REQUESTS]).start().finish()
    assert sum(a.timings["replacements"] for a in answers if a.timings) >= REQUESTS
    until(lambda: timeouts(system) >= REQUESTS, "the count of the lost pulls")
    assert all(w.process.exit_code() is None for w in system.workers.values())
    until_returned(system, switch)


def test_the_request_fails_where_the_operator_wants_it(
    tiny_model: Path,
    deploy: Callable[[Options], Deployment],
    short_ones: list[Reference],
    tmp_path: Path,
) -> None:
    switch = tmp_path / "switch"
    system = start(deploy, tiny_model, switch, "--on-kv-loss", "fail")
    switch.touch()
    with pytest.raises(AnswerError) as failed:
        system.http.complete(short_ones[0].prompt_tokens, max_tokens=8)
    assert failed.value.status == 500
    assert "KV cache" in failed.value.message
    until(lambda: timeouts(system) == 1, "the count of the lost pull")
    until_returned(system, switch)
