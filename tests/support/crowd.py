"""Many streamed requests at once, watched token by token while something breaks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from support.client import Answer, Client
from support.reference import Reference
from support.waiting import until


class Served(Protocol):
    """What a crowd asks."""

    @property
    def http(self) -> Client:
        """Its router's client."""

    def logs(self) -> str:
        """What its processes said."""


class Crowd:
    """Streams every reference's prompt at once; tells how far each one is.

    Args:
        deployment: who is asked.
        references: prompts and the answers expected of them.
    """

    def __init__(self, deployment: Served, references: Sequence[Reference], **options: Any) -> None:
        self._deployment = deployment
        self._references = list(references)
        self._options = options
        # A client each: nobody's connection is another's.
        shared = deployment.http
        self._clients = [Client(shared.url, shared.model) for _ in references]
        self._received = [0] * len(references)
        self._answers: list[Answer | BaseException | None] = [None] * len(references)
        self._threads = [
            threading.Thread(target=self._ask, args=(index,), daemon=True)
            for index in range(len(references))
        ]

    def start(self) -> Crowd:
        for thread in self._threads:
            thread.start()
        return self

    def _ask(self, index: int) -> None:
        reference = self._references[index]

        def count(answer: Answer) -> None:
            self._received[index] = len(answer.tokens)

        try:
            self._answers[index] = self._clients[index].stream(
                reference.prompt_tokens,
                max_tokens=len(reference.tokens),
                on_token=count,
                **self._options,
            )
        except BaseException as error:
            self._answers[index] = error
        finally:
            self._clients[index].close()

    def unfinished(self) -> int:
        return sum(answer is None for answer in self._answers)

    def failed(self) -> int:
        """How many requests have ended with an error."""
        return sum(isinstance(answer, BaseException) for answer in self._answers)

    def begun(self) -> int:
        """How many requests have received a token."""
        return sum(count > 0 for count in self._received)

    def wait_received(self, requests: int, tokens: int, *, deadline_s: float = 60.0) -> None:
        """Waits until so many requests have received so many tokens each.

        Raises:
            AssertionError: none of the requests is unfinished by then: nothing
                is left to be disturbed.
            BaseException: what a request ended with: nothing has gone wrong yet.
        """

        def probe() -> bool:
            for answer in self._answers:
                if isinstance(answer, BaseException):
                    answer.add_note(self._deployment.logs())
                    raise answer
            return sum(count >= tokens for count in self._received) >= requests

        self._wait(probe, f"{requests} requests with {tokens} tokens", deadline_s)
        assert self.unfinished() > 0, "everything was over before the fault"

    def _wait(self, probe: Callable[[], bool], what: str, deadline_s: float) -> None:
        until(
            probe,
            lambda: f"{what}; received {self._received}\n{self._deployment.logs()}",
            deadline_s=deadline_s,
            interval_s=0.001,
        )

    def finish(self, *, deadline_s: float = 90.0) -> list[Answer]:
        """Every answer, each compared with its reference.

        Raises:
            AssertionError: an answer that is not exactly the expected one.
            TimeoutError: a request is stuck.
        """
        answers, failures = self.outcomes(deadline_s=deadline_s)
        for failure in failures:
            failure.add_note(self._deployment.logs())
            raise failure
        return answers

    def outcomes(self, *, deadline_s: float = 90.0) -> tuple[list[Answer], list[BaseException]]:
        """Answers, each compared with its reference, and the errors of the others.

        Raises:
            AssertionError: an answer that is not exactly the expected one.
            TimeoutError: a request is stuck.
        """
        self._wait(lambda: self.unfinished() == 0, "all requests ended", deadline_s)
        answers: list[Answer] = []
        failures: list[BaseException] = []
        for reference, answer in zip(self._references, self._answers, strict=True):
            if isinstance(answer, Answer):
                check(answer, reference)
                answers.append(answer)
            else:
                assert answer is not None
                answer.add_note(reference.name)
                failures.append(answer)
        return answers, failures


def check(answer: Answer, reference: Reference) -> None:
    """An answer is exactly the reference: each token once, in order, and the right usage.

    Raises:
        AssertionError: it is not; the message names the first difference.
    """
    got, want = answer.tokens, reference.tokens
    pairs = zip(got, want, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(got), len(want)))
    assert got == want, (
        f"{reference.name}: differs from token {at} on ({len(got)} of {len(want)} tokens): "
        f"got {got[at : at + 8]}, expected {want[at : at + 8]}"
    )
    assert answer.finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage["prompt_tokens"] == len(reference.prompt_tokens)
    assert answer.usage["completion_tokens"] == len(want)
