"""What checks with real workers of other engines share: processes, requests, lines of checks."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

CHAT = "/v1/chat/completions"
MODEL = "smollm2"
WAIT_S = 60.0


class Process:
    """A child with its own process group and log."""

    def __init__(self, words: list[str], log: Path, env: dict[str, str] | None = None) -> None:
        self.log = log
        with log.open("wb") as out:
            self.child = subprocess.Popen(
                words,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )

    def kill(self) -> None:
        """Ends all of it at once, as a crash would."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child.pid, signal.SIGKILL)
        self.child.wait()


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def ask(port: int, path: str, body: Any = None, wait_s: float = WAIT_S) -> tuple[int, str, bytes]:
    """Status, content type and body of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=wait_s)
    try:
        if body is None:
            connection.request("GET", path)
        else:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", path, json.dumps(body), headers)
        answer = connection.getresponse()
        return answer.status, answer.headers.get("content-type", ""), answer.read()
    finally:
        connection.close()


def stream(port: int, body: dict[str, Any]) -> Iterator[str]:
    """The lines of a streamed answer. Closing it closes the connection."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", CHAT, json.dumps({**body, "stream": True}), headers)
        answer = connection.getresponse()
        check("a stream begins", answer.status == 200, answer.status)
        while line := answer.readline():
            yield line.decode().rstrip("\n")
    finally:
        connection.close()


def until(what: str, holds: Any, wait_s: float) -> None:
    """Waits for a condition; a connection that is refused does not fulfil it."""
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, http.client.HTTPException):
            if holds():
                return
        time.sleep(0.2)
    sys.exit(f"FAILED: waited {wait_s:.0f} s for {what}")


def metric(port: int, name: str) -> float:
    """The sum of a metric's series that begin with `name`."""
    text = ask(port, "/metrics")[2].decode()
    found = re.findall(rf"^{re.escape(name)}\S* (\S+)", text, re.MULTILINE)
    return sum(float(value) for value in found)


STARTED = time.monotonic()


def check(what: str, holds: bool, found: object = "") -> None:
    """Prints a line; ends the run if the check fails."""
    line = f"{time.monotonic() - STARTED:6.1f} s  {what}"
    if not holds:
        sys.exit(f"FAILED {line}: {found}")
    print(line, flush=True)


def chat(question: str, **fields: Any) -> dict[str, Any]:
    """A greedy request."""
    messages = [{"role": "user", "content": question}]
    return {"model": MODEL, "messages": messages, "temperature": 0, **fields}


def said(body: bytes) -> str:
    """The text of an answer."""
    return str(json.loads(body)["choices"][0]["message"]["content"])


def text_of(lines: list[str]) -> str:
    """The text of a stream, which must have ended well."""
    data = [line[6:] for line in lines if line.startswith("data: ")]
    check("  the stream ends with [DONE] and no error", data[-1] == "[DONE]", lines[-4:])
    chunks = [json.loads(one) for one in data[:-1]]
    deltas = [c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"]]
    return "".join(deltas)


def about(python: Path, packages: Sequence[str]) -> str:
    """What is tested, and on what: the commit, versions of a Python's packages, the machine."""
    script = """
import sys
from importlib.metadata import version
print(", ".join(f"{name} {version(name)}" for name in sys.argv[1:]))
"""
    words = [str(python), "-c", script, *packages]
    found = subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    described = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(described, capture_output=True, text=True, check=False).stdout.strip()
    model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    cpu = model.group(1) if model else platform.machine()
    return f"commit {commit or 'unknown'}; {found}; {cpu}, {os.cpu_count()} cores"


def start_router(program: Path, workers: Sequence[str], log: Path) -> tuple[Process, int]:
    """A router in front of workers, once all of them are up, and its port."""
    port = free_port()
    router = Process([str(program), "--port", str(port), "--worker", *workers], log)
    until("the router", lambda: metric(port, "tasuki_worker_up") == len(workers), WAIT_S)
    return router, port
