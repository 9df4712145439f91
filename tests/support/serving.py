"""`tasuki serve` as a test sees it."""

from __future__ import annotations

import re
from collections.abc import Callable

import psutil

from support.client import Client
from support.processes import Process
from support.waiting import until

START_DEADLINE_S = 120.0
Serve = Callable[..., Process]
"""Starts `tasuki serve` with these arguments."""


def wait_for_url(process: Process) -> str:
    """The URL of its banner."""

    def probe() -> str | None:
        assert process.exit_code() is None, process.output()
        found = re.search(r"^Serving .* at (https?://127\.0\.0\.1:\d+)$", process.output(), re.M)
        return found.group(1) if found else None

    return until(probe, lambda: f"a URL in\n{process.output()}", deadline_s=START_DEADLINE_S)


def workers_of(process: Process) -> dict[str, psutil.Process]:
    """Worker processes under the launcher, by their `--name`."""
    found = {}
    for child in process.descendants():
        try:
            command = child.cmdline()
        except psutil.NoSuchProcess:
            continue
        if "worker" in command and "--name" in command:
            found[command[command.index("--name") + 1]] = child
    return found


def decode_is_known(client: Client) -> bool:
    """Whether a deployment's router has a report of its one decode worker."""
    text = client.http.get("/metrics").text
    return len(re.findall(r'^tasuki_worker_total_blocks\{.*role="decode"', text, re.M)) == 1
