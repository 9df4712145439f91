"""A whole worker whose model folder lacks its weights: strict ends, and a pause holds it first."""

from __future__ import annotations

import json
import os
import re
import selectors
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
        words_left = process.communicate(timeout=DEADLINE_S)[1].decode()
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 78, words_left
    assert "tasuki: error: preflight: model weights: neither" in words_left
    assert message.read_text().startswith("model weights: neither")


def _until(process: subprocess.Popen[bytes], begins: str) -> str:
    """The first line of its output that has `begins`."""
    assert process.stderr is not None
    deadline_s, seen = time.monotonic() + DEADLINE_S, b""
    lines = selectors.DefaultSelector()
    lines.register(process.stderr, selectors.EVENT_READ)
    while time.monotonic() < deadline_s:
        if not lines.select(1.0):
            continue
        piece = os.read(process.stderr.fileno(), 4096)
        seen += piece
        for line in seen.decode(errors="replace").splitlines(keepends=True):
            if begins in line and line.endswith("\n"):
                return line
        if not piece:
            break
    raise AssertionError(f"no line with {begins!r}: {seen.decode()}")
