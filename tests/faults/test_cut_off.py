"""A worker whose connection goes silent without an end: its machine or the network is gone.

No FIN and no RST arrive, so only the router's pings can tell. Its requests go on elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.chaos.schedule import LOST_S
from support.crowd import Crowd
from support.deployment import Deployment, Options
from support.pace import Pace
from support.reference import Reference
from support.waiting import until

pytestmark = pytest.mark.faults
BUSY_S = 20.0  # on a busy machine


def test_requests_of_a_worker_that_is_cut_off_go_on_elsewhere(
    tiny_model: Path,
    deploy: Callable[[Options], Deployment],
    sixteen: list[Reference],
    pace: Pace,
) -> None:
    options = Options(
        tiny_model,
        mixed=2,
        worker=("--kv-memory", "50000000"),
        modules=pace.modules("mixed-0", "mixed-1"),
        relayed=True,
    )
    system = deploy(options)
    with pace.slow("mixed"):
        crowd = Crowd(system, sixteen).start()
        crowd.wait_received(requests=16, tokens=2)
        assert system.worker_holds("mixed-0")["running"] > 0
        begin_s = time.monotonic()
        system.relays["mixed-0"].vanish()
        until(
            lambda: system.retries() > 0,
            lambda: f"the silence to be noticed\n{system.logs()}",
            deadline_s=LOST_S + BUSY_S,
        )
        noticed_s = time.monotonic() - begin_s
    answers = crowd.finish()
    print(f"noticed after {noticed_s:.1f} s")
    assert sum(answer.timings["replacements"] for answer in answers if answer.timings) > 0
    # Its legs there end when the connection does; then it serves again.
    system.relays["mixed-0"].come_back()
    system.wait_connected()
    system.wait_idle()
    Crowd(system, sixteen).start().finish()
