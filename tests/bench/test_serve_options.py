"""Flags of `tasuki serve` that a sweep or a batch is given as NAME=VALUE."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tasuki.bench import serving
from tasuki.bench.arguments import words
from tasuki.bench.batch_command import batch
from tasuki.bench.errors import BenchError, RunFailedError
from tasuki.bench.serve_options import with_flags
from tasuki.bench.sweep_file import read_sweep


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("max-model-length", "did you mean max-model-len?"),
        ("max_model_lenght", "did you mean max-model-len?"),
        ("strict-role", "did you mean strict-roles?"),
        ("xyz", "`tasuki serve --help` lists them"),
    ],
)
def test_an_option_that_is_unknown_is_refused_before_anything_starts(
    name: str, remedy: str
) -> None:
    loads = [{"name": "chat", "arguments": {"num-requests": 1}}]
    own = {"topology": "1m", "serve": {name: 1}}
    dashed = name.replace("_", "-")
    for settings, where in (
        ({"topologies": ["1m"], "serve": {name: 1}}, "serve"),
        ({"topologies": [own]}, "topology 1m: serve"),
    ):
        with pytest.raises(BenchError) as error:
            read_sweep(None, {**settings, "loads": loads})
        says = f"{where}: {dashed} is no option of `tasuki serve`: {remedy}"
        assert str(error.value) == f"flags: {says}"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"strict-roles": "true"}, ["--strict-roles"]),
        ({"strict_roles": "True"}, ["--strict-roles"]),
        ({"strict-roles": "false", "no-admission": True}, ["--no-admission"]),
        ({"served-model-name": "true"}, ["--served-model-name", "true"]),
        ({"max-model-len": "64", "explain": None}, ["--max-model-len", "64"]),
    ],
)
def test_a_flag_is_said_without_a_value(given: dict[str, Any], said: list[str]) -> None:
    assert words(with_flags(given, "serve")) == said


def test_an_option_that_takes_one_value_is_refused_several() -> None:
    given = {"served-model-name": ["a", "b"], "max-model-len": [64]}
    said = ["--served-model-name", "a", "--served-model-name", "b", "--max-model-len", "64"]
    assert words(with_flags(given, "serve")) == said
    with pytest.raises(BenchError, match=r"serve: dtype has 2 values and takes one: give each to"):
        with_flags({"dtype": ["float32", "bfloat16"]}, "serve")


def test_a_sweep_takes_flags_from_the_command_line_and_from_a_file(tmp_path: Path) -> None:
    loads = [{"name": "chat", "arguments": {"num-requests": 1}}]
    flags = {"serve": {"strict-roles": "false", "no-admission": "true"}, "loads": loads}
    plan = read_sweep(None, {**flags, "topologies": ["1p1d"]})
    said = words(plan.serve_options(plan.targets[0]))
    assert said == ["--model", "smollm2-135m", "--no-admission"], "roles are strict by default"

    own = {"topology": "1m", "serve": {"strict-roles": "yes"}}
    with pytest.raises(BenchError, match=r"topology 1m: serve: strict-roles is 'yes': .* true or"):
        read_sweep(None, {"topologies": [own], "loads": loads})


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ({"serve": ["prefill=2"]}, "--serve has prefill: say it by --topology"),
        ({"serve": ["port=8000"]}, "--serve has port: a free one is taken"),
        ({"serve": ["dtype=float32"], "url": "http://a:1"}, "--serve belongs to a server that is"),
    ],
)
def test_options_that_a_batch_would_ignore_are_refused(said: dict[str, Any], says: str) -> None:
    with pytest.raises(BenchError, match=says):
        batch(**said)


def test_a_batch_starts_its_server_with_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []

    def start(arguments: list[str], *_: object) -> None:
        started.extend(arguments)
        raise RunFailedError("seen")

    monkeypatch.setattr(serving, "start_child", start)
    monkeypatch.setattr("tasuki.models.fetch.resolve_model", Path)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    with pytest.raises(RunFailedError, match="seen"):
        batch(model="m", serve=["no-admission=true", "strict-roles=false", "dtype=float32"])
    assert started[-3:] == ["--no-admission", "--dtype", "float32"]
    assert "--strict-roles" not in started
