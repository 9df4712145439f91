"""A request's choices go to a worker that generates so many at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from support.deployment import Deployment, Options

LIMIT = "--max-running-requests"


@pytest.fixture(scope="module")
def system(deploy_for_module: Callable[[Options], Deployment], tiny_model: Path) -> Deployment:
    options = Options(
        tiny_model,
        prefill=1,
        decode=1,
        worker=("--kv-memory", "64000000"),
        by_role={"prefill": (LIMIT, "2"), "decode": (LIMIT, "4")},
    )
    return deploy_for_module(options)


def ask(system: Deployment, n: int) -> httpx.Response:
    body = {"model": system.model, "prompt": [5] * 40, "n": n, "max_tokens": 8, "ignore_eos": True}
    return system.http.http.post("/v1/completions", json=body)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_choices_that_some_worker_takes_are_served(system: Deployment, n: int) -> None:
    for _ in range(3):
        response = ask(system, n)
        assert response.status_code == 200, response.text
        assert len(response.json()["choices"]) == n


def test_more_choices_than_any_worker_takes_are_refused_by_the_router(system: Deployment) -> None:
    response = ask(system, 5)
    assert response.status_code == 400, response.text
    message = response.json()["error"]["message"]
    assert message.startswith("n is 5, ")
    assert "at most 4 choices" in message and "lower n to 4" in message


def test_a_fleet_that_generates_is_healthy(system: Deployment) -> None:
    response = system.http.http.get("/health_generate", params={"model": system.model})
    assert (response.status_code, response.json()) == (200, {"status": "ok"})
