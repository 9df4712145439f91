"""A whole worker whose model folder lacks its weights: strict ends, and a pause holds it first."""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

pytestmark = pytest.mark.system

DEADLINE_S = 120.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    return tmp_path


def test_a_strict_worker_waits_and_then_ends_with_78(folder: Path) -> None:
    message = folder / "termination-log"
    words = ["worker", "--model", str(folder), "--preflight", "strict", "--pause"]
    process = subprocess.Popen(
        [sys.executable, "-m", "tasuki", *words, "--termination-log", str(message)],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        address = re.search(r"POST (http://127.0.0.1:\d+)/exit", _until(process, "paused: "))
        assert address is not None
        with urllib.request.urlopen(f"{address[1]}/", timeout=DEADLINE_S) as answer:
            checks = {check["name"]: check for check in json.load(answer)["checks"]}
        assert checks["model weights"]["status"] == "fail"
        assert process.poll() is None and not message.exists()
        request = urllib.request.Request(f"{address[1]}/exit", method="POST")
        urllib.request.urlopen(request, timeout=DEADLINE_S).close()
        _, words_left = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 78, words_left
    assert "tasuki: error: preflight: model weights: neither" in words_left
    assert message.read_text().startswith("model weights: neither")


def _until(process: subprocess.Popen[str], begins: str) -> str:
    """The first line of its output that has `begins`."""
    assert process.stderr is not None
    deadline_s, seen = time.monotonic() + DEADLINE_S, ""
    os.set_blocking(process.stderr.fileno(), False)
    while time.monotonic() < deadline_s and process.poll() is None:
        select.select([process.stderr], [], [], 1.0)
        seen += process.stderr.read() or ""
        for line in seen.splitlines(keepends=True):
            if begins in line and line.endswith("\n"):
                os.set_blocking(process.stderr.fileno(), True)
                return line
    raise AssertionError(f"no line with {begins!r}: {seen}")
