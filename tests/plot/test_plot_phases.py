"""Parts of the time to the second token where requests differ in their phases."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasuki.plot.figures.phases import parts_ms
from tasuki.plot.run import Request, Run, Stats


def request(exposed_ms: float | None) -> Request:
    moved = {} if exposed_ms is None else {"transfer_exposed_ms": exposed_ms}
    second_s = 0.1 + (exposed_ms or 0.0) / 1e3
    return Request(
        due_s=0.0,
        sent_s=0.0,
        first_s=0.1,
        second_s=second_s,
        end_s=second_s,
        output_tokens=2,
        phases_ms={"queue_ms": 20.0, "prefill_ms": 80.0, **moved},
    )


def test_a_phase_of_few_requests_counts_by_their_share() -> None:
    """One of four requests was split: its transfer is a quarter as long in the mean of all."""
    requests = (*(request(None) for _ in range(3)), request(400.0))
    phases = {"queue_ms": 20.0, "prefill_ms": 80.0, "transfer_exposed_ms": 400.0}
    measured = Run(
        Path("run.json"),
        "tasuki",
        "1p1m",
        ttst=Stats.of(each.latency_ms("ttst") for each in requests),
        phases={name: Stats(mean=mean) for name, mean in phases.items()},
        requests=requests,
    )
    parts = {name: value for _, name, value in parts_ms(measured)}
    assert parts == {"queue": 20.0, "prefill": 80.0, "transfer exposed": 100.0}
    assert sum(parts.values()) == pytest.approx(measured.ttst.mean)
