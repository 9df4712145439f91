"""Clients that ask without pause, and what became of each request."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import httpx
from cluster import MODEL, Cluster
from support.waiting import until

TOKENS = 96
PROMPT_TOKENS = 64


@dataclass
class Outcomes:
    """Of all requests that have ended.

    Attributes:
        ended: How many ended well.
        failures: What went wrong with the others.
        resumed: How often one was placed again.
        without_router: How often a request found no router ready.
        answers: Tokens by prompt; one prompt has one answer.
    """

    ended: int = 0
    failures: list[str] = field(default_factory=list)
    resumed: int = 0
    without_router: int = 0
    answers: dict[int, list[int]] = field(default_factory=dict)


class Load:
    """Streams requests from several threads until it is left.

    A request goes to a router that is ready when it begins, as a Service would send it. One
    that is refused a connection is sent to another router, as clients do; an answer that has
    begun must end well.
    """

    def __init__(self, cluster: Cluster, clients: int = 4) -> None:
        self._cluster = cluster
        self._ending = threading.Event()
        self._lock = threading.Lock()
        self.outcomes = Outcomes()
        self._threads = [
            threading.Thread(target=self._run, args=(number,), daemon=True)
            for number in range(clients)
        ]

    def __enter__(self) -> Load:
        self._retries = self._retries_by_router()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join(timeout=120)
            assert not thread.is_alive(), "a request is stuck"

    def await_ended(self, more: int, deadline_s: float = 120.0) -> None:
        """Wait until so many more requests have ended."""
        goal = self.outcomes.ended + more
        until(
            lambda: self.outcomes.ended >= goal or self.outcomes.failures,
            lambda: f"{more} more requests\n{self._cluster.describe()}",
            deadline_s=deadline_s,
            interval_s=0.05,
        )

    def check(self) -> None:
        """Nothing failed, and nothing was placed again."""
        assert self.outcomes.failures == [], self.outcomes.failures[:3]
        assert self.outcomes.resumed == 0
        assert self.outcomes.without_router == 0
        assert self.outcomes.ended > 0
        for router, retries in self._retries_by_router().items():
            assert retries == self._retries.get(router, 0.0), self._cluster.describe()
        assert self._cluster.router_metric("tasuki_requests_total") > 0

    def _retries_by_router(self) -> dict[str, float]:
        return self._cluster.router_metrics("tasuki_retries_total")

    def _run(self, number: int) -> None:
        with httpx.Client(timeout=120, trust_env=False) as http:
            count = 0
            while not self._ending.is_set():
                prompt = (number + 7 * count) % 16
                count += 1
                try:
                    self._ask(http, prompt)
                except Exception as error:
                    with self._lock:
                        self.outcomes.failures.append(f"{type(error).__name__}: {error}")

    def _ask(self, http: httpx.Client, prompt: int) -> None:
        tokens = [3 + (11 * prompt + 5 * position) % 90 for position in range(PROMPT_TOKENS)]
        body = {
            "model": MODEL,
            "prompt": tokens,
            "max_tokens": TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "timings": True,
        }
        answer = self._send(http, body, prompt)
        choice = answer["choices"][0]
        found = choice["token_ids"]
        assert len(found) == TOKENS, choice
        with self._lock:
            expected = self.outcomes.answers.setdefault(prompt, found)
            assert found == expected, f"prompt {prompt} has two answers"
            self.outcomes.ended += 1
            self.outcomes.resumed += answer["timings"]["replacements"]

    def _send(self, http: httpx.Client, body: dict[str, Any], turn: int) -> dict[str, Any]:
        while True:
            routers = self._cluster.ready_pods(component="router")
            for number in range(len(routers)):
                router = routers[(turn + number) % len(routers)]
                url = f"http://{router['status']['podIP']}:8000/v1/completions"
                try:
                    response = http.post(url, json=body)
                except httpx.ConnectError:
                    continue  # it has ended since: the Service's next endpoint
                if response.status_code == 503 and "shutting_down" in response.text:
                    continue
                response.raise_for_status()
                answer: dict[str, Any] = response.json()
                return answer
            with self._lock:
                self.outcomes.without_router += 1
            assert not self._ending.is_set(), "no router is ready"
            self._ending.wait(0.1)
