"""A load that goes on: how early a worker plans its steps while requests come and end.

On a GPU a step is planned while the one before runs, by the worker's account so long before
its end as its own launches took of late. They take longer beside requests that come, whose messages
need the interpreter too, than in a load that nothing changes in.
"""

from __future__ import annotations

import random
import time
from queue import SimpleQueue
from statistics import fmean
from threading import Timer
from typing import Any

from tasuki.bench.errors import RunFailedError
from tasuki.bench.worker_stream import SILENT, require_finished, step_reports, submit

_TOKENS = 512  # of a prompt, and of an answer, in the mean
_WHILE_S = 2.0  # it is measured
_APART_S = 0.02  # from an answer's end to the next request, at most


def planned_ahead(
    call: Any, outgoing: SimpleQueue[Any], batch: int, while_s: float = _WHILE_S
) -> float:
    """How long before a step's end the next one is planned, beside so many requests.

    Prompts and answers have 1 to 1,024 tokens, less where the pool is small. The place of an
    answer that ends is taken by another request, at any time within the next steps.

    Args:
        call: What the worker sends.
        outgoing: What it is sent.
        batch: Requests in the worker, most of which decode.
        while_s: Measured, once each of the first requests has a token.

    Returns:
        Seconds, in the mean over the reports.

    Raises:
        RunFailedError: An answer ended early, or the stream did.
    """
    for message in call:
        if message.HasField("info"):
            info = message.info
            break
    else:
        raise RunFailedError(SILENT)
    draw = random.Random(batch)
    fair = info.num_blocks * info.block_size // (4 * batch)
    most = max(2, min(2 * _TOKENS, fair, info.max_model_len // 2 - 1))
    number = 0

    def another() -> Any:
        nonlocal number
        number += 1
        name = f"steady-{batch}-{number}"
        return submit(name, number, info, draw.randrange(1, most), draw.randrange(1, most))

    first = [another() for _ in range(batch)]
    starting = {message.submit.request_id for message in first}
    for message in first:
        outgoing.put(message)
    seen: list[float] = []
    until_s = float("inf")
    for step in step_reports(call):
        starting -= {output.request_id for output in step.outputs}
        now_s = time.perf_counter()
        if not starting:
            until_s = min(until_s, now_s + while_s)
            seen.append(step.load.planned_ahead_s)
        if now_s >= until_s:
            break
        for end in step.ended:
            require_finished(end)
            late = Timer(_APART_S * draw.random(), outgoing.put, (another(),))
            late.daemon = True
            late.start()
    return fmean(seen)
