"""A result that cannot be written is an error before the measurement, and one line after it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tasuki import _native
from tasuki.bench import batch_command, sweep_command
from tasuki.bench.errors import BenchError
from tasuki.bench.header import check_writable, read_result, write_result
from tasuki.cli import app
from tasuki.linkbench import run as linkbench_run


@pytest.mark.parametrize(
    "words",
    [
        ["bench", "batch", "--steps", "-o"],
        ["bench", "batch", "--url", "http://127.0.0.1:1", "-o"],
        ["linkbench", "--save"],
    ],
    ids=lambda words: " ".join(words[:3]),
)
def test_a_path_is_refused_before_anything_is_measured(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(*_: object, **__: object) -> None:
        pytest.fail("it is measured")

    for module, name in (
        (batch_command, "_steps"),
        (batch_command, "_measure"),
        (linkbench_run, "measure"),
    ):
        monkeypatch.setattr(module, name, measure)
    done = CliRunner().invoke(app, [*words, "/proc/x.json"])
    assert isinstance(done.exception, BenchError), done.output
    assert str(done.exception) == (
        "cannot write the result to /proc/x.json (No such file or directory): choose a path that"
        " can be written"
    )


RUN = ["--lengths", "100:10", "--num-requests", "9", "--request-rate", "1"]
SPEEDS = ["--rates", "step-ms=5,prompt-token-us=20"]
GOAL = ["--gpus", "2", "--slo", "ttft=1s,tpot=50ms", "--quick", *SPEEDS, "--lengths", "100:10"]


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (_native.run_simulate, ["--mixed", "1", *SPEEDS, *RUN, "--output"]),
        (_native.run_plan, [*GOAL, "--output"]),
        (_native.run_plan, [*GOAL, "--values"]),
        (_native.run_bench, ["serve", "--base-url", "http://127.0.0.1:1", *RUN, "--output"]),
    ],
)
def test_a_native_command_refuses_its_path_first(
    run: Callable[[list[str]], int], words: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert run([*words, "/proc/x.json"]) == 1
    out, err = capfd.readouterr()
    assert "cannot write /proc/x.json: No such file or directory" in err
    assert not out


def test_without_a_result_file_any_folder_will_do(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir("/proc")
    words = ["serve", "--base-url", "http://127.0.0.1:1", *RUN, "--ready-timeout-s", "0.1"]
    assert _native.run_bench([*words, "--no-output"]) == 1
    assert "nobody listens at 127.0.0.1:1" in capfd.readouterr().err
    assert _native.run_bench(words) == 1
    assert "cannot write bench-" in capfd.readouterr().err


def test_a_sweep_refuses_its_folder_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(sweep_command, "_measure", lambda *_: pytest.fail("it is measured"))
    monkeypatch.setattr("tasuki.bench.check_loads.check_loads", lambda *_: None)
    words = ["bench", "sweep", "--model", str(tmp_path), "--topologies", "1m"]
    words += ["--load", "a --num-requests 1", "-o", "/proc/x"]
    done = CliRunner().invoke(app, words)
    assert isinstance(done.exception, BenchError), done.output
    assert "cannot write the result to /proc/x/sweep.json" in str(done.exception)


def test_a_failed_write_is_one_line_and_leaves_the_old_result(tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    write_result(kept, {"kind": "steps", "schema": "tasuki.bench/1"})
    (tmp_path / f".{os.getpid()}-kept.json").mkdir()
    with pytest.raises(BenchError, match=r"cannot write .*kept\.json \(Is a directory\): choose"):
        write_result(kept, {})
    assert read_result(kept, "steps")


def test_a_full_disk_gets_its_room_back(tmp_path: Path) -> None:
    part = tmp_path / f".{os.getpid()}-new.json"
    part.symlink_to("/dev/full")
    with pytest.raises(BenchError, match=r"No space left on device"):
        write_result(tmp_path / "new.json", {"kind": "steps"})
    assert not part.is_symlink()


def test_no_file_replaces_a_device_or_a_link(tmp_path: Path) -> None:
    file, to_file, to_device = (tmp_path / name for name in ("a.json", "b", "c"))
    to_file.symlink_to("a.json")
    to_device.symlink_to("/dev/null")
    for link in (to_file, to_device):
        check_writable(link)
        write_result(link, {"kind": "steps", "schema": "tasuki.bench/1"})
        assert link.is_symlink()
    assert read_result(file, "steps")
    assert to_device.is_char_device()


@pytest.mark.parametrize("second", ["--values", "--plot"])
def test_two_files_of_a_plan_have_two_paths(
    second: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "plan.html")
    assert _native.run_plan([*GOAL, "--output", path, second, path]) == 1
    says = f"--output and {second} are both {path}: give each a path of its own"
    assert says in capfd.readouterr().err


def test_a_check_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "result.json"
    check_writable(path)
    assert list(tmp_path.rglob("*")) == [path.parent]
    with pytest.raises(BenchError, match=r"folder \(Is a directory\)"):
        check_writable(path.parent)
