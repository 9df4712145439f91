"""A rank other than the first: builds its parts, then does as it is told until the pipe ends.

    python -m tasuki.worker.rank_process PIPE KV_PIPE [HOST STORE_PORT DEVICE_INDEX]

Started by the first rank (ranks.py), which alone plans, samples and serves, or on another host
by host_process.py, which says where it is. It
never waits for the device: what it is told to compute goes into the stream, and
the collectives keep the ranks together.

Threads: this one; the KV side's (kv/rank_channel.py).
"""

from __future__ import annotations

import functools
import logging
import os
import signal
import sys
import threading
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import NoReturn, TypeVar

import torch

from tasuki.errors import TasukiError
from tasuki.execution.executor import Executor
from tasuki.kv.rank_channel import KvRank
from tasuki.kv.transport import create_transport
from tasuki.launch.parent_death import follow_parent
from tasuki.models.spec_reader import read_spec
from tasuki.worker.device import network_of, use_device
from tasuki.worker.rank_messages import (
    CopyOrder,
    Failed,
    Fits,
    PoolShape,
    RankPlan,
    Ready,
    ScrubOrder,
    StepOrder,
    StopOrder,
)
from tasuki.worker.rank_parts import RankParts, meet, rank_device
from tasuki.worker.startup import Phases, keep_compiled, process_begun_s

log = logging.getLogger(__name__)

Expected = TypeVar("Expected")


def main(arguments: list[str]) -> NoReturn:
    """Be a rank over these two pipes.

    It leaves without cleaning up: a collective that the others left cannot be ended.
    """
    follow_parent()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # meant for the first rank, which then says Stop
    pipe, kv_pipe = (Connection(int(handle)) for handle in arguments[:2])
    threading.excepthook = functools.partial(_on_thread, pipe)
    code = 0
    try:
        with torch.inference_mode():
            _serve(pipe, kv_pipe, *arguments[2:])
    except EOFError:
        pass  # the first rank is gone
    except Exception as error:
        code = 1
        _tell(pipe, error)
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)


def _serve(pipe: Connection, kv_pipe: Connection, *place: str) -> None:
    plan = _receive(pipe, RankPlan)
    if place:
        host, port, index = place
        config = replace(plan.config, host=host, advertise=None)
        plan = replace(plan, config=config, port=int(port), device_index=int(index))
    _configure_logging(plan)
    executor, kv = _build(plan, pipe, kv_pipe)
    pipe.send(Ready())
    while True:
        match pipe.recv():
            case StepOrder(header):
                executor.staging.take(*header.parts())
                pipe.recv_bytes_into(executor.staging.filled())
                executor.run(header)
            case CopyOrder(pairs):
                executor.copy(pairs)
            case ScrubOrder(blocks, first_slot):
                executor.scrub(blocks, first_slot)
            case StopOrder():
                break
    del kv


def _build(plan: RankPlan, pipe: Connection, kv_pipe: Connection) -> tuple[Executor, KvRank]:
    """Build what the first rank builds, stage by stage."""
    phases = Phases(process_begun_s())
    phases.until_now("imports")
    keep_compiled()
    config = plan.config
    device = use_device(rank_device(plan))
    transport = create_transport(config.kv_transport, network=network_of(config, device))
    spec = read_spec(config.model, trust_remote_code=config.trust_remote_code)
    with phases.phase("ranks"):
        collective = meet(plan)
    parts = RankParts(plan, spec, collective, phases)
    pipe.send(Fits(parts.available_bytes()))
    shape = _receive(pipe, PoolShape)
    pool, layout = parts.make_pool(shape.num_blocks, transport)
    attention = parts.attend(pool)
    executor = Executor(parts.model, attention, pool, collective, len(layout.groups))
    parts.capture(executor, attention, shape.max_model_len)
    with phases.phase("transport"):
        transport.register(pool, layout)
    kv = KvRank(transport, kv_pipe)
    log.info("%s", phases.summary())
    return executor, kv


def _receive(pipe: Connection, expected: type[Expected]) -> Expected:
    """What comes next in a start.

    Raises:
        EOFError: The worker ends instead.
    """
    message = pipe.recv()
    if isinstance(message, StopOrder):
        raise EOFError
    assert isinstance(message, expected), message
    return message


def _on_thread(pipe: Connection, escaped: threading.ExceptHookArgs) -> None:
    """A thread of this rank has failed: the rank ends, and its worker with it."""
    if isinstance(escaped.exc_value, Exception):
        _tell(pipe, escaped.exc_value)
    logging.shutdown()
    os._exit(1)


def _tell(pipe: Connection, error: Exception) -> None:
    """Why this rank ends: to the log and to the first rank."""
    if isinstance(error, TasukiError):
        message = str(error)
    else:
        log.error("this rank failed", exc_info=error)
        message = f"{type(error).__name__}: {error}"
    try:
        pipe.send(Failed(message))
    except OSError:
        log.debug("the first rank is gone")


def _configure_logging(plan: RankPlan) -> None:
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO,
        format=f"%(asctime)s %(levelname)s worker={plan.config.name} role={plan.config.role}"
        f" rank={plan.rank} %(message)s",
    )


if __name__ == "__main__":
    main(sys.argv[1:])
