"""What goes over a router's stream to a worker, for measurements that take the router's place."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from tasuki.bench.errors import RunFailedError
from tasuki.v1 import worker_pb2 as pb

SILENT = "the worker ended its stream in the middle of a load"


def step_reports(call: Any) -> Iterator[Any]:
    """What the worker reports, step by step.

    Raises:
        RunFailedError: The stream ended.
    """
    for message in call:
        if message.HasField("step"):
            yield message.step
    raise RunFailedError(SILENT)


def require_finished(end: Any) -> None:
    """
    Raises:
        RunFailedError: An answer ended early.
    """
    if end.reason != pb.LEG_END_FINISHED:
        raise RunFailedError(f"an answer ended early: {end.message or end.reason}")


def submit(name: str, number: int, info: Any, prompt: int, answer: int) -> Any:
    """A request of so many random prompt tokens, which is answered with `answer` tokens.

    Args:
        name: Its id.
        number: Of the submit in its stream, from 1 on.
        info: The worker's.
        prompt: Tokens.
        answer: Tokens.
    """
    draw = random.Random(name)
    message = pb.Submit(
        request_id=name,
        leg=pb.LEG_COLOCATED,
        prompt_tokens=[draw.randrange(info.vocab_size) for _ in range(prompt)],
        choices=[0],
        sampling=pb.SamplingParams(seed=1, top_p=1.0, max_tokens=answer, repetition_penalty=1.0),
        number=number,
    )
    return pb.RouterMessage(submit=message)
