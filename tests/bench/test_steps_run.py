"""What happens around the measuring of step tables."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import typer

from tasuki.bench import batch_command, steps_run
from tasuki.bench.errors import BenchError, RunFailedError
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


def test_an_option_that_no_worker_has_is_refused(tiny_model: Path) -> None:
    with pytest.raises(BenchError, match="option max-model-length is none of a worker's"):
        steps_run.worker_config(str(tiny_model), {"max-model-length": "64"}, StepGrid())
    config = steps_run.worker_config(str(tiny_model), {"max-model-len": "64"}, StepGrid())
    assert config.max_model_len == 64


@pytest.mark.parametrize(
    ("device", "gpus", "batches"),
    [("auto", ("0",), (1, 64)), ("cpu", ("0",), (1, 32)), ("auto", (), (1, 32))],
)
def test_what_is_measured_fits_the_device(
    device: str, gpus: tuple[str, ...], batches: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    grids: list[StepGrid] = []

    def run(model: str, options: object, grid: StepGrid, say: object) -> dict[str, object]:
        grids.append(grid)
        raise RunFailedError("seen")

    monkeypatch.setattr(steps_run, "run_steps", run)
    monkeypatch.setattr("tasuki.launch.gpus.usable_gpus", lambda: gpus)
    # It would stay in this process.
    monkeypatch.setattr("tasuki.launch.topology.worker_environment", lambda *_: {})
    with pytest.raises(RunFailedError, match="seen"):
        batch_command._steps("tiny", "1m", {"device": device}, {"repeat": 1})
    assert set(batches) <= set(grids[0].decode_batch)
    assert grids[0].repeat == 1


@pytest.mark.parametrize(
    ("error", "ends"),
    [
        (KeyboardInterrupt(), "interrupted; the tables are medians of the rounds before"),
        (RunFailedError("it died"), "failed; the tables are medians of what was measured before"),
    ],
)
def test_an_interrupt_or_a_failure_writes_what_was_measured(
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    ends: str,
) -> None:
    said: list[str] = []
    is_error = isinstance(error, Exception)

    def say(line: str) -> None:
        said.append(line)
        if line == "round 2 of 3 …":
            raise error

    monkeypatch.setattr("tasuki.launch.supervisor.say", say)
    monkeypatch.setattr("tasuki.launch.topology.worker_environment", lambda *_: {})
    path = tmp_path / "steps.json"
    with pytest.raises(type(error) if is_error else typer.Exit) as ended:
        batch_command.batch(
            steps=True,
            model=str(tiny_model),
            serve=["device=cpu", "max-model-len=64"],
            prefill_tokens="8,16",
            prefill_context="0",
            decode_batch="",
            transfer_blocks="",
            repeat=3,
            result=path,
        )
    assert is_error or ended.value.exit_code == 130
    result = json.loads(path.read_text())
    assert result["interrupted"] == (not is_error)
    assert result["failed"] == ("it died" if is_error else None)
    assert [row["tokens"] for row in result["prefill"]] == [8, 16]
    assert said[-1] == ends
