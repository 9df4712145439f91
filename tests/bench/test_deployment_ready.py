"""What a benchmark waits for when it starts a deployment."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

import tasuki.bench.serving
from tasuki.bench.errors import RunFailedError
from tasuki.bench.serving import Serving
from tasuki.launch.config import Topology

pytestmark = pytest.mark.system


def says(monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    """In place of `tasuki serve` a process that says this, and waits."""

    def start(
        arguments: Sequence[str], log: Path, environment: Mapping[str, str] | None
    ) -> subprocess.Popen[bytes]:
        # As `tasuki serve` it heeds SIGINT, also where its parent ignores it.
        code = "import signal, time; signal.signal(signal.SIGINT, signal.default_int_handler); "
        code += f"print({line!r}, flush=True); time.sleep(600)"
        with log.open("ab") as output:
            return subprocess.Popen(
                [sys.executable, "-c", code], stdout=output, start_new_session=True
            )

    monkeypatch.setattr(tasuki.bench.serving, "start_child", start)


@pytest.mark.parametrize(
    ("name", "url"),
    [("tiny", "http://127.0.0.1:8000"), ("My Model at home", "https://[::1]:8000")],
)
def test_a_server_is_known_by_its_banner(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, url: str
) -> None:
    says(monkeypatch, f"Serving {name} at {url}")
    serving = Serving(Topology(1, 1, 0), {}, tmp_path / "serve.log")
    assert (serving.model, serving.url) == (name, url)
    serving.stop()


def test_it_has_as_long_as_tasuki_serve(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    says(monkeypatch, "loading")
    monkeypatch.setattr(tasuki.bench.serving, "_START_MARGIN_S", 0.25)
    with pytest.raises(RunFailedError, match=r"not ready after 0\.75 s"):
        Serving(Topology(1, 1, 0), {"startup-timeout": 0.5}, tmp_path / "serve.log")


@pytest.mark.parametrize("seconds", ["soon", None])
def test_a_start_timeout_that_is_no_number_is_refused_by_tasuki_serve(
    tmp_path: Path, seconds: str | None
) -> None:
    options = {"startup-timeout": seconds, "max-model-len": "long"}
    with pytest.raises(RunFailedError, match=r"tasuki serve ended \(exit status 2\).*--"):
        Serving(Topology(0, 0, 1), options, tmp_path / "serve.log")


def test_a_log_that_is_gone_does_not_hide_that_a_server_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    says(monkeypatch, "Serving tiny at http://127.0.0.1:8000")
    log = tmp_path / "serve.log"
    serving = Serving(Topology(1, 1, 0), {}, log)
    log.unlink()
    serving.stop()
    assert "serve.log cannot be read: No such file or directory" in str(serving.ended())
