"""`tasuki scale`: workers start and drain under a running `tasuki serve`."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.client import Client
from support.processes import environment
from support.serving import Serve, wait_for_url
from support.waiting import until


@pytest.mark.timeout(600)
def test_decode_grows_and_shrinks_under_requests(
    serve: Serve, tiny_model: Path, tmp_path: Path
) -> None:
    socket = tmp_path / "s.sock"
    settings = ("--dtype", "float32", "--kv-memory", "16MB", "--port", "0", "--strict-roles")
    process = serve("--model", str(tiny_model), *settings, "--control-socket", str(socket))
    client = Client(wait_for_url(process), "llama")
    expected = client.complete("gong bast", max_tokens=200).tokens
    done = threading.Event()

    def ask() -> int:
        answers = 0
        while not done.is_set() or not answers:
            assert client.complete("gong bast", max_tokens=200).tokens == expected
            answers += 1
        return answers

    def scale(count: int) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tasuki", "scale", "decode", str(count)]
        return subprocess.run(
            [*command, "--control-socket", str(socket)],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )

    def decoders() -> int:
        lines = client.http.get("/metrics").text.splitlines()
        up = [line for line in lines if line.startswith("tasuki_worker_up{")]
        return sum('role="decode"' in line for line in up)

    with ThreadPoolExecutor(3) as pool:
        asking = [pool.submit(ask) for _ in range(3)]
        try:
            more = scale(3)
            assert more.stdout == "1 prefill + 3 decode: 4 workers, 2 before\n", more.stderr
            until(lambda: decoders() == 3, process.tail, deadline_s=120)
            fewer = scale(1)
            assert fewer.stdout == "1 prefill + 1 decode: 2 workers, 4 before\n", fewer.stderr
            until(lambda: decoders() == 1, process.tail, deadline_s=120)
        finally:
            done.set()
        assert all(each.result(60) for each in asking)
    refused = scale(64)
    assert refused.returncode == 1
    assert "use 1 to 64 in all" in refused.stderr
    client.close()
