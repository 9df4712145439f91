"""Runs a function in as many processes as there are ranks, joined like those of a worker."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

DEADLINE_S = 120.0


def on_ranks(
    size: int, work: Callable[..., Any], *arguments: Any, device_type: str = "cpu"
) -> list[Any]:
    """What `work(collective, *arguments)` gives on each rank.

    Args:
        size: How many processes.
        work: A module's function; runs in a new process, so it is imported there.
        arguments: Picklable.
        device_type: "cpu", or "cuda": rank r's device is number r.
    """
    from tasuki.execution.distributed import make_store

    store = make_store(size)
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe(duplex=False) for _ in range(size)]
    processes = [
        context.Process(
            target=_run,
            args=(pipe[1], rank, size, store.port, sys.path, device_type, work, arguments),
        )
        for rank, pipe in enumerate(pipes)
    ]
    for process, (_, theirs) in zip(processes, pipes, strict=True):
        process.start()
        theirs.close()
    try:
        results = []
        for ours, _ in pipes:
            assert ours.poll(DEADLINE_S), "a rank is silent"
            results.append(ours.recv())
    finally:
        for process in processes:
            process.kill()
            process.join()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def _run(
    pipe: Connection,
    rank: int,
    size: int,
    port: int,
    path: list[str],
    device_type: str,
    work: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    sys.path[:] = path
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    from tasuki.execution.distributed import join

    torch.set_num_threads(1)
    try:
        device = torch.device("cpu")
        if device_type == "cuda":
            device = torch.device("cuda", rank)
            torch.cuda.set_device(device)
        result = work(join(rank, size, port, device), *arguments)
    except BaseException as error:
        error.__cause__ = error.__context__ = None
        result = RuntimeError(f"rank {rank}: {error!r}")
    pipe.send(result)
    pipe.close()
