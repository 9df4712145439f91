"""Programs that benchmarks build, start and listen to."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]


def build(*programs: str) -> Path:
    """Build programs of the router's crate in release; the folder they are in.

    Args:
        programs: As cargo names them: `--bin tasuki-router`, `--example fake_workers`.
    """
    command = ["cargo", "build", "--quiet", "--release", "--locked", "-p", "tasuki-router"]
    subprocess.run([*command, *programs], cwd=ROOT, check=True)
    metadata = ["cargo", "metadata", "--format-version", "1", "--no-deps"]
    told = subprocess.run(metadata, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return Path(json.loads(told)["target_directory"]) / "release"


def free_port() -> int:
    """A port of this machine that nobody has now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running(command: list[str], cores: list[int] | None = None) -> Iterator[subprocess.Popen[str]]:
    """A program, on these cores alone if they are given; ended at the end."""
    # From its beginning: a thread that is there already would keep all cores.
    pin = None if cores is None else lambda: os.sched_setaffinity(0, cores)
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        preexec_fn=pin,
    )
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def said(process: subprocess.Popen[str], marker: str) -> str:
    """The word after `marker` in the next line that has it."""
    assert process.stdout is not None
    for line in process.stdout:
        if marker in line:
            return line.split(marker, 1)[1].split()[0]
    raise SystemExit(f"{process.args} ended without saying {marker!r}")
