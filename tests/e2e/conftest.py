"""`tasuki serve`, started and ended as a user would."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.processes import Process
from support.serving import Serve


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    monkeypatch.setenv("TASUKI_CACHE", str(tmp_path / "cache"))  # logs are kept there
    started: list[Process] = []

    def start(*arguments: str) -> Process:
        log = tmp_path / f"serve-{len(started)}.log"
        started.append(Process("serve", ["serve", *arguments], log))
        started[-1].start()
        return started[-1]

    yield start
    for process in started:
        if process.exit_code() is None:
            children = process.descendants()
            process.kill()
            for child in children:
                if child.is_running():
                    child.kill()
