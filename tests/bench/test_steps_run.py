"""What happens around the measuring of step tables."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tasuki.bench import steps_run
from tasuki.bench.errors import RunFailedError
from tasuki.bench.steps import StepGrid
from tasuki.models.cache import cache_root


def test_what_is_compiled_is_kept_where_workers_look_for_it(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FLASHINFER_WORKSPACE_BASE", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.setenv(name, "to be restored")
        monkeypatch.delenv(name)
    found: list[str] = []

    def build(*_: object) -> None:
        found.append(os.environ["FLASHINFER_WORKSPACE_BASE"])
        raise RunFailedError("seen")

    monkeypatch.setattr(steps_run, "build", build)
    with pytest.raises(RunFailedError, match="seen"):
        grid = StepGrid(decode_batch=())  # else a worker is started first
        steps_run.run_steps(str(tiny_model), {"device": "cpu"}, grid, lambda _: None)
    assert found[0].startswith(str(cache_root()))
