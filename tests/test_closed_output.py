"""Commands in Rust whose standard output nobody reads on, or whose disk is full."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.planning import LOAD, RATES
from support.processes import environment

pytestmark = pytest.mark.system

TASUKI = [sys.executable, "-m", "tasuki"]
COMMANDS = {
    "simulate": ["simulate", "--rates", RATES, *LOAD],
    "plan": ["plan", "--rates", RATES, "--gpus", "1", "--slo", "ttft=1s,tpot=50ms", "--quick"],
    "serve": ["bench", "serve", "--num-requests", "3", "--lengths", "8:4", "--workload", "fixed"],
}


@contextmanager
def command_of(name: str) -> Iterator[list[str]]:
    """The words of a command, while what it needs is there."""
    if name != "serve":
        yield [*TASUKI, *COMMANDS[name]]
        return
    fake = [*TASUKI, "bench", "fake-server", "--port", "0"]
    with subprocess.Popen(fake, stdout=subprocess.PIPE, text=True, env=environment()) as server:
        assert server.stdout is not None
        url = server.stdout.readline().split()[-1]
        yield [*TASUKI, *COMMANDS[name], "--base-url", url]
        server.terminate()


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("output", ["closed pipe", "full disk"])
def test_the_result_is_written_all_the_same(name: str, output: str, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    if output == "full disk":
        out = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, out = os.pipe()
        os.close(reader)
    try:
        with command_of(name) as words:
            done = subprocess.run(
                [*words, "--output", str(path)],
                stdout=out,
                stderr=subprocess.PIPE,
                text=True,
                timeout=120,
                env=environment(),
            )
    finally:
        os.close(out)
    assert json.loads(path.read_text())
    if output == "full disk":
        assert done.returncode == 1
        assert "cannot print the report (No space left on device" in done.stderr
    else:
        assert (done.returncode, done.stderr) == (0, "")


def test_a_plan_that_cannot_be_written_leaves_the_one_that_was_there(tmp_path: Path) -> None:
    kept = tmp_path / "plan.json"
    kept.write_text("kept")
    done = subprocess.run(
        [*TASUKI, *COMMANDS["plan"], "--lengths", "500:50", "--output", str(kept)],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment(),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)),
    )
    assert done.returncode == 1
    assert f"cannot write {kept}: File too large" in done.stderr
    assert kept.read_text() == "kept"
    assert list(tmp_path.iterdir()) == [kept]


@pytest.mark.parametrize("output", ["closed pipe", "full disk"])
@pytest.mark.parametrize("is_buffered", [True, False], ids=["buffered", "unbuffered"])
def test_commands_in_python_end_without_a_traceback(output: str, is_buffered: bool) -> None:
    if output == "full disk":
        out = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, out = os.pipe()
        os.close(reader)
    said = {"PYTHONUNBUFFERED": "" if is_buffered else "1"}
    try:
        done = subprocess.run(
            [*TASUKI, "model", "list"],
            stdout=out,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            env={**environment(), **said},
        )
    finally:
        os.close(out)
    wrong = "tasuki: error: cannot write (No space left on device): make room\n"
    assert (done.returncode, done.stderr) == (1, wrong if output == "full disk" else "")
