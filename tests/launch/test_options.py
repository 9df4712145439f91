"""What the command line takes and what it refuses."""

from __future__ import annotations

import re
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from tasuki.cli import app
from tasuki.command_line import parse_bytes, parse_host_port, with_options
from tasuki.launch.config import ServeConfig
from tasuki.options import arguments, options_of, types_of
from tasuki.worker.config import WorkerConfig


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1500000", 1_500_000),
        ("512MB", 512_000_000),
        ("512m", 512_000_000),
        ("2GiB", 2 << 30),
        ("1.5 G", 1_500_000_000),
        ("64KiB", 65_536),
    ],
)
def test_amounts(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "many", "-1", "5TB", "1e9"])
def test_nonsense_is_refused_with_the_value(text: str) -> None:
    with pytest.raises(typer.BadParameter) as refused:
        parse_bytes(text)
    assert repr(text) in str(refused.value)


def test_an_address_has_a_host_and_a_port() -> None:
    for right in ("10.0.0.8:7001", "prefill-0.example:1", "[fd00::8]:65535"):
        assert parse_host_port(f" {right}") == right
    for wrong in ("", "host", "host:", ":7001", "fd00::8:7001", "h:65536", "h:7x", "[]:7", "h:-1"):
        with pytest.raises(typer.BadParameter, match=r"is no HOST:PORT: use"):
            parse_host_port(wrong)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--max-model-len", "1"),
        ("--max-model-len", "-5"),
        ("--max-concurrent-requests", "0"),
        ("--max-connections", "0"),
        ("--body-timeout-s", "0"),
        ("--client-stall-s", "-1"),
        ("--drain-s", "-1"),
        ("--drain-s", "90000"),
        ("--startup-timeout", "-1"),
        ("--kv-memory", "lots"),
    ],
)
def test_values_out_of_range_are_refused_before_anything_starts(option: str, value: str) -> None:
    refused = CliRunner().invoke(app, ["serve", option, value])
    assert refused.exit_code == 2
    assert f"Invalid value for '{option}'" in refused.output


@pytest.mark.parametrize(
    ("words", "model"),
    [
        ([], "smollm2-135m"),
        (["owner/name"], "owner/name"),
        (["--model", "owner/name"], "owner/name"),
        (["owner/name", "--model", "owner/name"], "owner/name"),
    ],
)
def test_serve_takes_its_model_with_and_without_the_option(
    words: list[str], model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[ServeConfig] = []
    monkeypatch.setattr("tasuki.launch.serve.serve", lambda config: (started.append(config), 0)[1])
    assert CliRunner().invoke(app, ["serve", "--device", "cpu", *words]).exit_code == 0
    assert started[0].model == model


def test_two_models_are_refused() -> None:
    refused = CliRunner().invoke(app, ["serve", "one", "--model", "other"])
    assert "the model is one and --model other: give one of them" in str(refused.exception)


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("--model", "--model is ''"),
        ("--host", "--host is ''"),
        ("--worker-host", "--worker-host is ''"),
        ("--rdma-devices", "rdma_devices is ''|rdma-devices is ''"),
        ("--tenant-header", "--tenant-header is ''"),
        ("--api-key-env", "--api-key-env is ''"),
        ("--metrics-listen", "--metrics-listen is ''"),
    ],
)
def test_an_empty_value_is_refused(option: str, says: str) -> None:
    words = ["serve", "--prefill", "1", option, "", "--dry-run"]
    done = CliRunner().invoke(app, words)
    assert re.search(f"({says}): (give|use) a value.* leave the option out", str(done.exception))


def test_every_option_of_a_worker_survives_the_command_line() -> None:
    """What the launcher passes on is what the worker reads."""
    plain = WorkerConfig()
    changed = WorkerConfig(**{name: another(name) for name in options_of(WorkerConfig)})
    assert [n for n in options_of(WorkerConfig) if getattr(changed, n) == getattr(plain, n)] == []
    read: list[WorkerConfig] = []

    @with_options()
    def command(*, config: WorkerConfig) -> None:
        read.append(config)

    app = typer.Typer()
    app.command()(command)
    done = CliRunner().invoke(app, arguments(changed))
    assert done.exit_code == 0, done.output
    assert read == [changed]


def another(name: str) -> Any:
    """A value that a worker's option allows and that is not its default."""
    fitting = {"device": "cpu", "nodes": ("a:1", "b"), "tensor_parallel": 2, "rank": 1}
    if name in fitting:
        return fitting[name]
    known, kind, default = (
        options_of(WorkerConfig)[name],
        types_of(WorkerConfig)[name],
        getattr(WorkerConfig(), name),
    )
    if known.choices:
        return next(w for w in known.choices if w not in (default, "auto", "int8"))
    if kind is bool:
        return True
    if kind in (int, float):
        low, high = known.bounds
        return kind(next(n for n in (low, high, 7) if n not in (None, default)))
    return kind("other")
