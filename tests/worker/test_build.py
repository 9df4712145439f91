"""What is settled before a worker's parts are built."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tasuki.processor import usable_cores
from tasuki.worker import build
from tasuki.worker.config import WorkerConfig
from tasuki.worker.startup import Phases


@pytest.mark.parametrize(("cores", "said", "threads"), [(1.5, "", 1), (64.0, "", 4), (1.5, "4", 4)])
def test_a_containers_quota_bounds_the_threads(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, cores: float, said: str, threads: int
) -> None:
    used: list[int] = []
    monkeypatch.setattr(build, "usable_cores", lambda: cores)
    monkeypatch.setattr(build, "_build", lambda *_: used.append(torch.get_num_threads()))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if said:
        monkeypatch.setenv("OMP_NUM_THREADS", said)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        build.build(WorkerConfig(model=tiny_model, device="cpu"), Phases(0.0))
    finally:
        torch.set_num_threads(before)
    assert used == [threads]


def test_a_quota_is_read(tmp_path: Path) -> None:
    machine = usable_cores(tmp_path)
    assert machine >= 1
    for text, cores in (("max 100000", machine), ("50000 100000", 0.5), ("nonsense", machine)):
        (tmp_path / "cpu.max").write_text(f"{text}\n")
        assert usable_cores(tmp_path) == cores


def test_a_quota_of_version_1_is_read(tmp_path: Path) -> None:
    machine = usable_cores(tmp_path)
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu/cpu.cfs_period_us").write_text("100000\n")
    for quota, cores in (("-1", machine), ("50000", 0.5)):
        (tmp_path / "cpu/cpu.cfs_quota_us").write_text(f"{quota}\n")
        assert usable_cores(tmp_path) == cores
