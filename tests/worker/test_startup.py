"""Where a start's time went, and where compiled kernels are kept."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tasuki.worker.startup import Phases, keep_compiled, process_begun_s


class Clock:
    """Goes when told."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_phases_add_up_to_the_whole() -> None:
    clock = Clock()
    phases = Phases(begun_s=94.0, clock=clock)
    phases.until_now("imports")
    for _ in range(2):
        with phases.phase("transport"):
            clock.now_s += 0.5
    with phases.phase("weights"):
        clock.now_s += 3.0
    clock.now_s += 0.25
    assert phases.summary() == (
        "started in 10.2 s: imports 6.0, transport 1.0, weights 3.0, other 0.2"
    )


def test_a_process_began_before_now() -> None:
    begun_s = process_begun_s()
    assert begun_s < time.monotonic()
    assert abs(process_begun_s() - begun_s) < 0.1


def test_compiled_kernels_are_kept_in_the_cache_folder_unless_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TASUKI_CACHE", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    for variable in ("FLASHINFER_WORKSPACE_BASE", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.setenv(variable, "")  # so that what is set here is undone
        monkeypatch.delenv(variable)
    keep_compiled()
    assert Path(os.environ["FLASHINFER_WORKSPACE_BASE"]) == tmp_path / "compiled"
    assert Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) == tmp_path / "compiled" / "inductor"
    assert os.environ["TRITON_CACHE_DIR"] == "/elsewhere"
