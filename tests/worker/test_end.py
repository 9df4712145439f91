"""The end of a worker process: what it wrote is there, and Python's own end is left out."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import REPOSITORY, environment

pytestmark = pytest.mark.system

# Through a pipe, stdout keeps what is printed until it is flushed.
WORKER = """
import atexit, sys
from tasuki.cli import main
atexit.register(print, "Python ends", file=sys.stderr)
print("before the worker")
main()
"""


def test_a_worker_ends_in_order_and_without_pythons_own_end(tiny_model: Path) -> None:
    words = ["worker", "--model", str(tiny_model), "--dtype", "float32", "--device", "cpu"]
    variables = environment()
    del variables["PYTHONUNBUFFERED"]
    with subprocess.Popen(
        [sys.executable, "-c", WORKER, *words],
        cwd=REPOSITORY,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as worker:
        try:
            assert worker.stdout is not None
            lines = [worker.stdout.readline() for _ in range(2)]
            assert lines[0] == "before the worker\n" and lines[1].startswith("ready 127.0.0.1:")
            worker.send_signal(signal.SIGTERM)
            _, said = worker.communicate(timeout=60)
        finally:
            worker.kill()
    assert worker.returncode == 0, said
    assert said.rstrip().endswith("role=mixed drained"), said
    assert "Python ends" not in said


# As callbacks in C++ do while the real one is imported: what they raise is printed and lost.
SWALLOWS = """
import time
print("torch is imported", flush=True)
try:
    time.sleep(60)
except KeyboardInterrupt:
    print("lost", flush=True)
    time.sleep(60)
"""


def test_ctrl_c_ends_a_worker_that_imports_torch(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(SWALLOWS)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from tasuki.cli import main; main()"
    with subprocess.Popen(
        [sys.executable, "-c", code, "worker", "--model", str(tiny_model), "--device", "cpu"],
        cwd=REPOSITORY,
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as worker:
        try:
            assert worker.stdout is not None
            assert worker.stdout.readline() == "torch is imported\n"
            worker.send_signal(signal.SIGINT)
            assert worker.stdout.readline() == ""
            assert worker.wait(60) == -signal.SIGINT
        finally:
            worker.kill()
