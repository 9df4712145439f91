"""Runs a function in as many processes as there are ranks, joined like those of a worker.

They are forked from a process that has imported torch: the import takes longer than most tests.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

DEADLINE_S = 120.0
# One fork server serves all modules of tests that have such a context; each preloads torch.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch"])


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
    pipes = [_CONTEXT.Pipe(duplex=False) for _ in range(size)]
    processes = [
        _CONTEXT.Process(
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
