"""`tasuki serve` whose output has no reader any more: it serves, restarts and drains as before."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

import psutil
import pytest
from support.client import Client
from support.processes import REPOSITORY, environment
from support.serving import decode_is_known
from support.waiting import until

pytestmark = pytest.mark.system


@contextlib.contextmanager
def serve_into_pipe(model: Path) -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes]]]:
    """The launcher, and the reading end of the pipe that has its output."""
    settings = ("--dtype", "float32", "--max-model-len", "512", "--port", "0")
    process = subprocess.Popen(
        [sys.executable, "-m", "tasuki", "serve", "--model", str(model), *settings],
        cwd=REPOSITORY,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        yield process, process.stdout
    finally:
        process.stdout.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(60)


def decode_worker(launcher: subprocess.Popen[bytes]) -> psutil.Process | None:
    for child in psutil.Process(launcher.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "decode-0" in child.cmdline():
                return child
    return None


def test_without_a_reader_workers_come_back_and_requests_end_in_order(tiny_model: Path) -> None:
    with serve_into_pipe(tiny_model) as (launcher, output):
        url = ""
        for line in output:
            if found := re.match(rb"Serving .* at (http://\S+)$", line):
                url = found[1].decode()
            if line == b"Ctrl-C stops.\n":
                break
        output.close()
        client = Client(url, tiny_model.name)
        answer = client.complete("gong bast", max_tokens=20)

        first = decode_worker(launcher)
        assert first is not None
        first.kill()
        until(
            lambda: (
                launcher.poll() is None
                and (again := decode_worker(launcher)) is not None
                and again.pid != first.pid
                and decode_is_known(client)
            ),
            lambda: f"decode-0 is back; the launcher's exit code: {launcher.poll()}",
            deadline_s=60,
            interval_s=0.2,
        )
        assert client.complete("gong bast", max_tokens=20).tokens == answer.tokens

        begun = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            last = pool.submit(
                client.stream, "gong bast", max_tokens=400, on_token=lambda _: begun.set()
            )
            assert begun.wait(30)
            launcher.send_signal(signal.SIGTERM)
            assert len(last.result(60).tokens) == 400
        assert launcher.wait(60) == 0
        client.close()
