"""A request whose prefill worker dies keeps its place in the decode worker's line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.crowd import Crowd
from support.deployment import Deployment, Options
from support.pace import Pace
from support.reference import Reference
from support.waiting import until

pytestmark = pytest.mark.faults
PREFILL = ("prefill-0", "prefill-1")


@pytest.fixture
def system(tiny_model: Path, deploy: Callable[[Options], Deployment], pace: Pace) -> Deployment:
    return deploy(
        Options(
            tiny_model,
            prefill=len(PREFILL),
            decode=1,
            by_role={"decode": ("--max-running-requests", "1")},
            router=("--strict-roles", "--no-admission"),  # requests wait at the workers
            modules=pace.modules("decode-0"),
        )
    )


def test_what_is_placed_again_is_decoded_before_what_came_later(
    system: Deployment, sixteen: list[Reference], short_ones: list[Reference], pace: Pace
) -> None:
    """The decode worker has one slot, taken until all of the line stand in it again."""
    with pace.slow("decode"):
        before_them = Crowd(system, sixteen[:1]).start()
        before_them.wait_received(requests=1, tokens=3)
        line: list[Crowd] = []
        for name in PREFILL:
            system.stop_process(name)
        try:
            for reference in short_ones[:6]:
                line.append(Crowd(system, [reference]).start())
                until(lambda: system.total("waiting", "decode") == len(line), "it waits for its KV")
            retries = system.retries()
            system.kill(PREFILL[0])
            until(lambda: system.retries() > retries, "the loss to be noticed")
        finally:
            system.continue_process(PREFILL[1])
        until(lambda: all(crowd.begun() for crowd in line), "first tokens of them all")
        assert before_them.unfinished()
    answers = [crowd.finish()[0] for crowd in line]
    before_them.finish()
    again = [(answer.timings or {}).get("replacements", 0) > 0 for answer in answers]
    assert not all(again[again.index(True) :]), "none that stayed came after one placed again"
    ends = [answer.arrivals_s[-1] for answer in answers]
    assert ends == sorted(ends), (again, ends)
