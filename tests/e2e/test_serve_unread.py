"""`tasuki serve` whose output has no reader, or no handle: it serves and drains as before."""

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

import httpx
import psutil
import pytest
from support.client import Client
from support.processes import REPOSITORY, environment
from support.serving import decode_is_known
from support.waiting import free_port, until

pytestmark = pytest.mark.system


@contextlib.contextmanager
def serving(model: Path, *more: str, shell: str = 'exec "$@"') -> Iterator[subprocess.Popen[bytes]]:
    """The launcher, which a line of shell starts; its output goes to a pipe."""
    command = [sys.executable, "-m", "tasuki", "serve", "--model", str(model), *more]
    settings = ("--dtype", "float32", "--max-model-len", "512")
    process = subprocess.Popen(
        ["sh", "-c", shell, "sh", *command, *settings],
        cwd=REPOSITORY,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        yield process
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
    with serving(tiny_model, "--port", "0") as launcher:
        output, url = launcher.stdout, ""
        assert output is not None
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


def test_without_standard_handles_it_serves(tiny_model: Path) -> None:
    port = free_port()
    settings = ("--mixed", "1", "--port", str(port))
    with serving(tiny_model, *settings, shell='exec "$@" <&- >&- 2>&-') as launcher:
        client = Client(f"http://127.0.0.1:{port}", tiny_model.name)

        def is_ready() -> bool:
            assert launcher.poll() is None
            with contextlib.suppress(httpx.TransportError):
                return client.http.get("/ready").status_code == 200
            return False

        until(is_ready, "the router is ready", deadline_s=60, interval_s=0.1)
        assert len(client.complete("gong bast", max_tokens=5).tokens) == 5
        handles = [os.readlink(f"/proc/{launcher.pid}/fd/{number}") for number in range(3)]
        assert handles == [os.devnull] * 3
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(60) == 0
        client.close()
