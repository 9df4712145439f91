"""`tasuki plot` as a person types it."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest
from plot_synthetic import write_sweep
from typer.testing import CliRunner

from tasuki.cli import app
from tasuki.plot.command import FIGURES
from tasuki.plot.errors import PlotError
from tasuki.plot.figures.registry import NAMES

FIXTURES = Path(__file__).parent / "fixtures"


def plot(*words: str | Path) -> list[str]:
    result = CliRunner().invoke(app, ["plot", *map(str, words)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout.split()


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sweep(tmp_path_factory.mktemp("sweep"), rates=(1, 2), count=30)


@pytest.mark.slow
def test_everything_by_default(sweep: Path, tmp_path: Path) -> None:
    written = plot(sweep, "-o", tmp_path / "out")
    names = [Path(path).name for path in written]
    timelines = [f"timeline-{i}.png" for i in (1, 2, 3, 4)]
    assert names[0] == "index.html"
    expected = ["pareto", "load", "goodput", "phases", "cdf", "compare", "ttft"]
    assert sorted(names[1:]) == sorted([*(f"{name}.png" for name in expected), *timelines])
    assert all(Path(path).stat().st_size > 5000 for path in written)


def test_one_figure_into_one_file(sweep: Path, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "pareto.png"
    options = ("--against", "chunk", "--chunk", "8", "--stat", "p99", "--per-gpu")
    assert plot("pareto", sweep, "-o", out, *options) == [str(out)]
    page = tmp_path / "pareto.html"
    plot("pareto", sweep, "-o", page, *options)
    assert "p99 TTFT + 7 x TPOT (ms)" in page.read_text(encoding="utf-8")


def test_other_tools_beside_one_another(tmp_path: Path) -> None:
    words = [f"{name}={FIXTURES / name}" for name in ("vllm", "sglang", "genai_bench", "aiperf")]
    page = tmp_path / "all.html"
    plot("pareto", *words, "-o", page)
    text = page.read_text(encoding="utf-8")
    assert all(f"<td>{name}</td>" in text for name in ("vllm", "sglang", "genai_bench", "aiperf"))


@pytest.mark.parametrize("name", ["pareto.svg", "pareto.PDF"])
def test_a_picture_of_another_kind_is_refused(name: str, tmp_path: Path) -> None:
    out = tmp_path / name
    says = rf"{out} ends in {out.suffix}: end it in \.png or \.html, or name a folder"
    with pytest.raises(PlotError, match=says):
        plot("pareto", FIXTURES / "vllm", "-o", out)
    words = ["plan", "--rates", "step-ms=5,prompt-token-us=20", "--lengths", "9:9", "--gpus", "1"]
    words += ["--slo", "ttft=1s,tpot=50ms", "-o", str(tmp_path / "p.json"), "--plot", str(out)]
    with pytest.raises(PlotError, match=says):
        CliRunner().invoke(app, words, catch_exceptions=False)
    assert not list(tmp_path.iterdir())


def test_an_ending_may_be_in_capitals(tmp_path: Path) -> None:
    out = tmp_path / "pareto.PNG"
    assert plot("pareto", FIXTURES / "vllm", "-o", out) == [str(out)]
    assert out.read_bytes().startswith(b"\x89PNG")


def test_many_figures_are_no_single_png(sweep: Path, tmp_path: Path) -> None:
    one = r"one PNG holds one figure, not 4 \(timeline-1, .*: give a figure's name, or --load"
    with pytest.raises(PlotError, match=one):
        plot("timeline", sweep, "-o", tmp_path / "a.png")


def test_a_figure_needs_results() -> None:
    with pytest.raises(PlotError, match="pareto: say which results, like `tasuki plot pareto"):
        plot("pareto")


@pytest.mark.parametrize("words", [["paretto"], ["paretto", "."]])
def test_a_figure_that_does_not_exist_is_told_with_those_that_do(words: list[str]) -> None:
    says = r"^paretto is neither a figure nor a file or folder: figures are pareto, load, "
    with pytest.raises(PlotError, match=says):
        plot(*words)


@pytest.mark.system
def test_errors_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{")
    words = [sys.executable, "-m", "tasuki", "plot", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.startswith(f"tasuki: error: {tmp_path / 'a.json'}: is not JSON")
    assert done.stderr.count("\n") == 1


def test_an_output_that_cannot_be_written(sweep: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PlotError, match=r"file/a\.png cannot be written \(.*choose another --out"):
        plot("pareto", sweep, "-o", tmp_path / "file" / "a.png")


@pytest.mark.system
@pytest.mark.parametrize("name", ["a.png", "a.html"])
def test_a_full_disk_leaves_the_picture_that_was_there(name: str, tmp_path: Path) -> None:
    out = tmp_path / name
    out.write_text("kept")
    words = ["plot", "pareto", str(FIXTURES / "vllm"), "-o", str(out)]
    done = subprocess.run(
        [sys.executable, "-m", "tasuki", *words],
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000)),
    )
    says = f"tasuki: error: {out} cannot be written (File too large): choose another --out\n"
    assert (done.returncode, done.stderr) == (1, says)
    assert out.read_text() == "kept"
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.system
def test_the_command_line_loads_no_drawing_library() -> None:
    code = "import sys, tasuki.cli; print([m for m in ('matplotlib', 'plotly', 'numpy')"
    code += " if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]"


def test_help_names_every_figure() -> None:
    assert FIGURES == NAMES
    text = CliRunner().invoke(app, ["plot", "--help"]).output
    assert all(f"\n    {name} " in text for name in FIGURES)


def test_a_missing_library_names_the_extra(
    sweep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for name in [each for each in sys.modules if each.startswith("tasuki.plot.")]:
        if name.rpartition(".")[2] in ("write", "png", "labels"):
            monkeypatch.delitem(sys.modules, name)
    with pytest.raises(PlotError, match=r"matplotlib, which is not installed: .*tasuki\[plot\]"):
        plot("pareto", sweep, "-o", tmp_path)
