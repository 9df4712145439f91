"""The ranks of a worker as processes: they start, fail and end together."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from support.processes import Process, has_ended
from support.waiting import until

from tasuki.worker.config import WorkerConfig
from tasuki.worker.device import Dtypes
from tasuki.worker.rank_messages import PoolShape, RankPlan
from tasuki.worker.ranks import RankError, Ranks

pytestmark = pytest.mark.system

DEADLINE_S = 120.0


@pytest.fixture
def worker(tiny_model: Path, tmp_path: Path) -> Iterator[Process]:
    """A worker of two ranks that is ready."""
    words = ["worker", "--model", str(tiny_model), "--tp", "2"]
    words += ["--dtype", "float32", "--device", "cpu", "--kv-memory", "16MB"]
    process = Process("worker", words, tmp_path / "worker.log")
    process.start()
    try:
        process.wait_for_line("ready ", deadline_s=DEADLINE_S)
        yield process
    finally:
        process.kill()


def rank_of(process: Process) -> psutil.Process:
    (rank,) = (
        each for each in process.descendants() if "tasuki.worker.rank_process" in each.cmdline()
    )
    return rank


def test_a_rank_that_dies_ends_the_worker(worker: Process) -> None:
    rank_of(worker).kill()
    assert worker.wait() == 1
    assert "rank 1: it ended by signal 9" in worker.output()


def test_ranks_end_with_a_first_one_that_is_killed(worker: Process) -> None:
    rank = rank_of(worker)
    os.kill(worker.pid, signal.SIGKILL)
    until(lambda: has_ended(rank), "rank 1 gone with the first one")


def test_they_listen_on_this_machine_only_and_a_signal_to_all_ends_them_in_order(
    worker: Process,
) -> None:
    rank = rank_of(worker)
    sockets = [s for p in (psutil.Process(worker.pid), rank) for s in p.net_connections("inet")]
    listening = {s.laddr.ip for s in sockets if s.status == psutil.CONN_LISTEN}
    assert {address.removeprefix("::ffff:") for address in listening} == {"127.0.0.1"}
    os.killpg(worker.pid, signal.SIGTERM)
    assert worker.wait() == 0, worker.tail()
    assert has_ended(rank)
    assert "a rank has ended" not in worker.output()


def make_plan(model: Path) -> RankPlan:
    config = WorkerConfig(model, tensor_parallel=2, device="cpu")
    return RankPlan(
        config, config.limits(on_cuda=False), Dtypes(torch.float32, torch.float32), "cpu"
    )


def test_what_a_rank_cannot_start_with_is_the_workers_error(tmp_path: Path) -> None:
    failures: list[RankError] = []
    ranks = Ranks(2, 1, failures.append)
    try:
        ranks.build(make_plan(tmp_path / "nothing"))
        with pytest.raises(RankError, match=r"rank 1: .*nothing has no config.json"):
            ranks.least_available(None)
        caused = RuntimeError("connection closed by peer")
        assert re.match("rank 1: .*no config.json", str(ranks.explain(caused)))
        until(lambda: len(failures) == 1, "the failure is told once")
        with pytest.raises(RankError):
            ranks.make_pools(PoolShape(2, 16))
            time.sleep(0.1)
            ranks.await_ready()
    finally:
        ranks.close()


def test_a_rank_that_is_closed_has_not_failed(tiny_model: Path) -> None:
    failures: list[RankError] = []
    ranks = Ranks(2, 1, failures.append)
    (process,) = ranks._processes
    ranks.close(timeout_s=60)
    assert process.poll() == 0
    until(lambda: not ranks._listener.is_alive(), "the listener ends")
    assert not failures
