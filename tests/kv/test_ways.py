"""The way that UCX names is read, and called by the slowest part of it."""

from __future__ import annotations

import os

import pytest

from tasuki.kv import ucx_log
from tasuki.kv.ways import Way

# As UCX 1.23 prints them.
CMA = """\
[1795545356.337955] [vm:15661:0]   +--------+-------------+--------------------------------+
[1795545356.337955] [vm:15661:0]   | tasuki-a35d5a0f43df42c0a422a8ac intra-node cfg#1     |
[1795545356.337955] [vm:15661:0]   | remote memory read by ucp_get* into host memory from host |
[1795545356.337955] [vm:15661:0]   +--------+-------------+--------------------------------+
[1795545356.337955] [vm:15661:0]   | Range  | Description |            Config              |
[1795545356.337955] [vm:15661:0]   +--------+-------------+--------------------------------+
[1795545356.337955] [vm:15661:0]   | 0..inf | zero-copy   | cma/memory                     |
[1795545356.337955] [vm:15661:0]   +--------+-------------+--------------------------------+
"""


@pytest.mark.parametrize(
    ("described", "kind", "lanes"),
    [
        ("tcp/eth0", "tcp", ("tcp/eth0",)),
        ("cma/memory", "shm", ("cma/memory",)),
        ("cuda_ipc/cuda", "cuda_ipc", ("cuda_ipc/cuda",)),
        (
            "50% on rc_mlx5/mlx5_0:1/path0 and 50% on rc_mlx5/mlx5_0:1/path1",
            "rdma",
            ("rc_mlx5/mlx5_0:1",),
        ),
        ("90% on rc_mlx5/mlx5_0:1 and 10% on tcp/eth0", "tcp", ("rc_mlx5/mlx5_0:1", "tcp/eth0")),
        ("teleport/beam", "other", ("teleport/beam",)),
    ],
)
def test_a_way_is_called_by_its_slowest_lane(
    described: str, kind: str, lanes: tuple[str, ...]
) -> None:
    assert Way.of(described) == Way(kind, lanes)


@pytest.fixture
def captured() -> ucx_log.UcxLog:
    return ucx_log.UcxLog()


def _write(captured: ucx_log.UcxLog, text: str) -> None:
    """As UCX does, which opens the file by name, once."""
    with open(captured.variables[ucx_log.FILE], "r+b") as file:
        file.seek(0, os.SEEK_END)
        file.write(text.encode())


def test_tables_are_read_once_they_are_whole(captured: ucx_log.UcxLog) -> None:
    agent = "tasuki-a35d5a0f43df42c0a422a8ac51aa12cd"  # longer than UCX keeps
    with open(captured.variables[ucx_log.FILE], "wb", buffering=0) as stream:
        half = CMA.index("cma/")
        stream.write(CMA[:half].encode())
        assert captured.ways(agent) == []
        stream.write(CMA[half:].encode())
        assert captured.ways(agent) == [Way("shm", ("cma/memory",))]
        stream.write(CMA.replace("a35d", "ffff").replace("cma/memory", "tcp/lo    ").encode())
        assert captured.ways(agent) == [Way("shm", ("cma/memory",))]
        assert captured.ways("tasuki-ffff5a0f43df42c0a422a8ac") == [Way("tcp", ("tcp/lo",))]


def test_writes_are_not_reads(captured: ucx_log.UcxLog) -> None:
    _write(captured, CMA.replace("memory read", "memory write"))
    assert captured.ways("tasuki-a35d5a0f43df42c0a422a8ac") == []


def test_what_else_ucx_says_is_logged(
    captured: ucx_log.UcxLog, caplog: pytest.LogCaptureFixture
) -> None:
    _write(captured, "[1.2] [vm:1:0]  ib_md.c:42  UCX  ERROR ibv_reg_mr failed: no memory\n" + CMA)
    assert captured.ways("tasuki-a35d5a0f43df42c0a422a8ac")
    assert [record.getMessage() for record in caplog.records] == [
        "ib_md.c:42 UCX ERROR ibv_reg_mr failed: no memory"
    ]


@pytest.mark.parametrize("name", ["UCX_LOG_FILE", "UCX_LOG_LEVEL", "UCX_PROTO_INFO"])
def test_an_operator_who_directs_the_output_keeps_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ucx_log, "_log", None)
    assert ucx_log.capture({name: "x"}) == {}
    assert ucx_log.ways("any") == []


def test_what_a_parent_process_set_is_set_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ucx_log, "_log", None)
    inherited = {"UCX_LOG_FILE": "/proc/self/fd/99", "UCX_LOG_LEVEL": "error"}
    variables = ucx_log.capture(inherited)
    assert variables["UCX_LOG_FILE"] != inherited["UCX_LOG_FILE"]
    assert os.path.exists(variables["UCX_LOG_FILE"])
