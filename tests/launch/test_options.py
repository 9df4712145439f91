"""What the command line takes and what it refuses."""

from __future__ import annotations

import pytest
import typer
from typer.testing import CliRunner

from tasuki.cli import app
from tasuki.launch.options import parse_bytes


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


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--max-model-len", "0"),
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
