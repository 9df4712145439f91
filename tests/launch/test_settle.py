"""The dtype is measured once and remembered."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from support.processes import environment
from support.waiting import until

from tasuki.launch.errors import LaunchError
from tasuki.launch.settle import settle_dtype


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TASUKI_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


class Measurement:
    """Stands in for the process that measures."""

    def __init__(self, stdout: str = "", stderr: str = "", code: int = 0) -> None:
        self.runs = 0
        self._result = (code, stdout, stderr)

    def __call__(self, command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        self.runs += 1
        code, stdout, stderr = self._result
        return subprocess.CompletedProcess(command, code, stdout, stderr)


def test_measured_once_for_model_and_threads(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measurement = Measurement('some noise\n["bfloat16", "2.0x"]\n')
    monkeypatch.setattr(subprocess, "run", measurement)
    assert settle_dtype(model, "auto", {"OMP_NUM_THREADS": "1"}) == ("bfloat16", "2.0x")
    again = settle_dtype(model, "auto", {"OMP_NUM_THREADS": "1"})
    assert again[0] == "bfloat16"
    assert "measured earlier" in again[1]
    assert measurement.runs == 1
    settle_dtype(model, "auto", {"OMP_NUM_THREADS": "2"})
    assert measurement.runs == 2
    (model / "config.json").write_text('{"other": 1}')
    settle_dtype(model, "auto", {"OMP_NUM_THREADS": "1"})
    assert measurement.runs == 3


def test_what_is_asked_for_is_not_measured(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measurement = Measurement()
    monkeypatch.setattr(subprocess, "run", measurement)
    assert settle_dtype(model, "float32", {})[0] == "float32"
    assert measurement.runs == 0


def test_a_refused_model_is_told_in_its_own_words(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "run", Measurement(stderr="MambaForCausalLM: no\n", code=1))
    with pytest.raises(LaunchError, match="MambaForCausalLM: no"):
        settle_dtype(model, "auto", {})


def test_a_spoilt_cache_is_measured_anew(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measurement = Measurement('["float32", "1.0x"]')
    monkeypatch.setattr(subprocess, "run", measurement)
    stored = model.parent / "cache" / "dtype.json"
    for content in ("{", "[]", '{"k": 3}'):
        stored.parent.mkdir(exist_ok=True)
        stored.write_text(content)
        assert settle_dtype(model, "auto", {}) == ("float32", "1.0x")
    assert measurement.runs == 3


def test_a_config_that_cannot_be_read_is_told(model: Path) -> None:
    (model / "config.json").unlink()
    with pytest.raises(LaunchError, match=r"cannot serve .*config\.json'; make it readable"):
        settle_dtype(model, "auto", {})


@pytest.mark.system
def test_the_measurement_ends_with_its_launcher(model: Path) -> None:
    (model / "torch.py").write_text("import time; time.sleep(600)")
    code = f"""
import sys
from pathlib import Path
from tasuki.launch.settle import settle_dtype
settle_dtype(Path({str(model)!r}), "auto", {{}})
"""
    own = environment()
    own["PYTHONPATH"] = f"{model}:{own['PYTHONPATH']}"
    with subprocess.Popen([sys.executable, "-c", code], env=own) as launcher:

        def measures() -> psutil.Process | None:
            for child in psutil.Process(launcher.pid).children():
                if "tasuki.launch.settle" in child.cmdline():
                    return child
            return None

        measurement = until(measures, "the measurement", deadline_s=60)
        launcher.kill()
    try:
        measurement.wait(60)
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            measurement.kill()
