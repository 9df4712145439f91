"""Nobody left: what waits, what is refused, and what a router's own end leaves behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.crowd import Crowd
from support.deployment import Deployment, Options
from support.pace import Pace
from support.reference import Reference
from support.waiting import until

pytestmark = pytest.mark.faults

RECOVER_S = 90.0


@pytest.fixture(scope="module")
def system(
    tiny_model: Path, deploy_for_module: Callable[[Options], Deployment], pace: Pace
) -> Deployment:
    return deploy_for_module(
        Options(
            tiny_model,
            mixed=1,
            worker=("--kv-memory", "50000000"),
            router=("--recover-s", str(RECOVER_S)),
            modules=pace.modules("mixed-0"),
        )
    )


@pytest.fixture(autouse=True)
def settled(system: Deployment) -> Iterator[None]:
    yield
    system.restore()
    system.wait_idle()


def test_accepted_requests_wait_for_the_only_worker(
    system: Deployment, sixteen: list[Reference], pace: Pace
) -> None:
    """It dies in mid-stream and comes back: nobody notices but for the pause."""
    with pace.slow("mixed"):
        crowd = Crowd(system, sixteen).start()
        crowd.wait_received(requests=3, tokens=30)
        system.kill("mixed-0")
    system.restart("mixed-0")
    answers = crowd.finish(deadline_s=RECOVER_S)
    assert any(answer.timings and answer.timings["replacements"] for answer in answers)


def test_new_requests_are_turned_away_at_once(system: Deployment) -> None:
    system.kill("mixed-0")
    http = system.http.http
    until(lambda: http.get("/ready").status_code == 503, "the loss to be noticed")
    assert http.get("/live").status_code == 200
    assert http.get("/health").status_code == 503
    body = {"model": system.model, "prompt": "gong", "max_tokens": 4}
    for stream in (False, True):
        response = http.post("/v1/completions", json={**body, "stream": stream}, timeout=5)
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) > 0
        assert "worker" in response.json()["error"]["message"]
        assert "127.0.0.1" not in response.text
    system.restore()
    assert http.post("/v1/completions", json=body).status_code == 200


def test_a_dead_router_leaves_no_work_behind(
    system: Deployment, sixteen: list[Reference], pace: Pace
) -> None:
    """Its streams end, so workers drop its requests; the next router finds them idle."""
    before = system.total("output_tokens_total")
    with pace.slow("mixed"):
        crowd = Crowd(system, sixteen).start()
        crowd.wait_received(requests=3, tokens=30)
        system.restart_router()
        system.wait_idle()  # long before the requests would have been over: they were dropped
    produced = system.total("output_tokens_total") - before
    assert produced < sum(len(reference.tokens) for reference in sixteen)
    check = system.http.stream(sixteen[0].prompt_tokens, max_tokens=len(sixteen[0].tokens))
    assert check.tokens == sixteen[0].tokens
