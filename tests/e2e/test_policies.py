"""`--policy`: workers are chosen by another rule than the cost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from support.deployment import Deployment, Options


def test_round_robin_takes_one_worker_after_another(
    tiny_model: Path, deploy: Callable[[Options], Deployment]
) -> None:
    memory = ("--kv-memory", "64000000")
    router = ("--policy", "round-robin")
    system = deploy(Options(tiny_model, mixed=2, worker=memory, router=router))
    taken = []
    for first in range(6):
        answer = system.http.complete([first + 3, 5, 7], max_tokens=2)
        assert answer.timings is not None
        assert answer.timings["prefill_worker"] == answer.timings["decode_worker"]
        taken.append(answer.timings["prefill_worker"])
    assert taken == taken[:2] * 3
    assert taken[0] != taken[1]
