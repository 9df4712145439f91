"""A result that cannot be written is an error before the measurement, and one line after it."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from tasuki.bench import batch_command
from tasuki.bench.errors import BenchError
from tasuki.bench.header import check_writable, read_result, write_result
from tasuki.cli import app
from tasuki.linkbench import run


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

    for module, name in ((batch_command, "_steps"), (batch_command, "_measure"), (run, "measure")):
        monkeypatch.setattr(module, name, measure)
    done = CliRunner().invoke(app, [*words, "/proc/x.json"])
    assert isinstance(done.exception, BenchError), done.output
    assert str(done.exception) == (
        "cannot write the result to /proc/x.json (No such file or directory): choose a path that"
        " can be written"
    )


def test_a_failed_write_is_one_line_and_leaves_the_old_result(tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    write_result(kept, {"kind": "steps", "schema": "tasuki.bench/1"})
    (tmp_path / "kept.json.part").mkdir()
    with pytest.raises(BenchError, match=r"cannot write .*kept\.json \(Is a directory\): choose"):
        write_result(kept, {})
    assert read_result(kept, "steps")


def test_a_check_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "result.json"
    check_writable(path)
    assert list(tmp_path.rglob("*")) == [path.parent]
    with pytest.raises(BenchError, match=r"folder \(Is a directory\)"):
        check_writable(path.parent)
