"""`tasuki router`: models that are given by name become folders."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from tasuki import _native
from tasuki.cli import app
from tasuki.models import fetch
from tasuki.models.fetch import FetchError


def test_names_of_models_are_folders_for_the_router(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[str] = []

    def run_router(words: list[str]) -> int:
        given.extend(words)
        return 0

    monkeypatch.setattr(_native, "run_router", run_router)
    monkeypatch.setattr(fetch, "resolve_model", lambda name: Path("/models", name))
    monkeypatch.chdir(tmp_path)
    Path("own").mkdir()
    for words, expected in (
        (["--model", "smollm2-135m"], ["--model", "/models/smollm2-135m"]),
        (["--model=owner/model@main"], ["--model=owner/model=/models/owner/model@main"]),
        (["--model", "b=owner/model"], ["--model", "b=/models/owner/model"]),
        (["--model", "small=smollm2-135m"], ["--model", "small=/models/smollm2-135m"]),
        (["--model", "own", "--model", "b=own"], ["--model", "own", "--model", "b=own"]),
        (["--model", "/a=b", "--model", "./c"], ["--model", "/a=b", "--model", "./c"]),
        (["--model", "a=/b=c", "--model", "own"], ["--model", "a=/b=c", "--model", "own"]),
        (["--port", "0", "--model"], ["--port", "0", "--model"]),
    ):
        assert CliRunner().invoke(app, ["router", *words]).exit_code == 0
        assert given == expected
        given.clear()


def test_a_model_that_is_not_there_is_refused_with_the_remedy() -> None:
    refused = CliRunner().invoke(app, ["router", "--model", "smollm3"])
    assert isinstance(refused.exception, FetchError)
    assert "no model 'smollm3': give 'smollm2-135m', a folder" in str(refused.exception)


@pytest.mark.parametrize("command", ["router", "simulate"])
def test_a_name_that_is_too_long_for_a_folder_is_refused(command: str) -> None:
    refused = CliRunner().invoke(app, [command, "--model", "x" * 300])
    assert isinstance(refused.exception, FetchError)
    assert "cannot be read: File name too long" in str(refused.exception)
