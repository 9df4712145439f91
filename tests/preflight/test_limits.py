"""Limits that are really too small, in processes of their own; and what the values mean."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.sysfs import eight_rails

from tasuki.preflight import environment, limits
from tasuki.preflight.environment import log_levels, transports

# A process without privileges that may lock 64 KiB: locking 1 MiB fails, which is what RDMA does.
_LOCK_LITTLE = """
import ctypes, json, os, resource, sys
from pathlib import Path
from tasuki.kv.rdma_devices import rdma_devices
from tasuki.preflight.limits import memlock
rdma = bool(rdma_devices(Path(sys.argv[1])))
resource.setrlimit(resource.RLIMIT_MEMLOCK, (65_536, 65_536))
if os.geteuid() == 0:
    os.setgid(65_534)
    os.setuid(65_534)
memory = ctypes.create_string_buffer(1 << 20)
refused = ctypes.CDLL(None).mlock(memory, len(memory)) != 0
check = memlock(rdma)
print(json.dumps([refused, check.status, check.found, check.remedy]))
"""
_FEW_FILES = """
import resource
from tasuki.preflight.limits import open_files
resource.setrlimit(resource.RLIMIT_NOFILE, ({0}, {0}))
print(open_files().status)
"""
_SHM = "from tasuki.preflight.limits import shared_memory; print(shared_memory({}).status)"


def _run(program: str, *arguments: str, before: tuple[str, ...] = ()) -> str:
    words = [*before, sys.executable, "-c", program, *arguments]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.system
def test_memory_that_cannot_be_locked_fails_where_there_is_rdma(tmp_path: Path) -> None:
    rails = str(eight_rails(tmp_path))
    refused, status, found, remedy = json.loads(_run(_LOCK_LITTLE, rails))
    assert refused, "the child could lock memory: nothing was broken"
    assert (status, found) == ("fail", "65,536 bytes") and "ulimit -l unlimited" in remedy


def test_memlock_matters_for_rdma_without_the_capability_only() -> None:
    assert limits.memlock(rdma=False, limit_bytes=65_536, exempt=False).status == "ok"
    assert limits.memlock(rdma=True, limit_bytes=65_536, exempt=True).status == "ok"
    assert limits.memlock(rdma=True, limit_bytes=-1, exempt=False).status == "ok"
    assert limits.memlock(rdma=True, limit_bytes=65_536, exempt=False).status == "fail"


@pytest.mark.system
@pytest.mark.parametrize(("files", "status"), [(256, "fail"), (1_024, "warn"), (4_096, "ok")])
def test_few_files(files: int, status: str) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if 0 <= hard < files:
        pytest.skip(f"this process may open {hard} files only")
    assert _run(_FEW_FILES.format(files)) == status


@pytest.mark.system
@pytest.mark.parametrize(
    ("size", "ranks", "status"), [("16m", 1, "fail"), ("100m", 1, "warn"), ("100m", 2, "fail")]
)
def test_a_small_shm(size: str, ranks: int, status: str) -> None:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("mounting a small /dev/shm requires root and the program unshare")
    mounted = f'mount -t tmpfs -o size={size} none /dev/shm && exec "$@"'
    before = ("unshare", "--mount", "sh", "-c", mounted, "sh")
    assert _run(_SHM.format(ranks), before=before) == status


def test_no_shm_at_all(tmp_path: Path) -> None:
    check = limits.shared_memory(folder=tmp_path / "shm")
    assert check.status == "fail" and "--shm-size" in check.remedy


def test_transports_that_are_installed_are_told_from_those_that_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lacks = {"mooncake": "mooncake is not installed: pip install it"}
    monkeypatch.setattr(environment, "missing", lambda backend: lacks.get(backend.name, ""))
    assert transports().found == (
        "nixl-ucx, host-staged, shm, tcp, nixl-libfabric (untried), nixl-uccl (untried);"
        " not mooncake: mooncake is not installed: pip install it"
    )


def test_levels_that_slow_transfers_are_named() -> None:
    slow = {"UCX_LOG_LEVEL": "debug", "NIXL_LOG_LEVEL": "TRACE", "NCCL_DEBUG": "INFO"}
    check = log_levels(slow)
    assert (check.status, check.found) == ("warn", "UCX_LOG_LEVEL=debug, NIXL_LOG_LEVEL=TRACE")
    assert check.remedy == "unset UCX_LOG_LEVEL NIXL_LOG_LEVEL"
    assert log_levels({"UCX_LOG_LEVEL": "error"}).status == "ok"
