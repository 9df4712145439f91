"""Further routers, in front of workers that other tests started."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from support.processes import Process

START_DEADLINE_S = 30.0


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[Sequence[str]], tuple[Process, str]]]:
    """Starts a router and gives its URL."""
    processes: list[Process] = []

    def launch(arguments: Sequence[str]) -> tuple[Process, str]:
        process = Process("router", ["router", *arguments], tmp_path / "router.log")
        processes.append(process)
        process.start()
        return process, process.wait_for_line("listening on ", deadline_s=START_DEADLINE_S)

    yield launch
    for process in processes:
        process.kill()
