"""The Rust extension says what the rest of Python says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tasuki import _native

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "block_hashes.json").read_text())


@pytest.mark.parametrize("case", GOLDEN, ids=[case["name"] for case in GOLDEN])
def test_block_hashes_equal_the_golden_values(case: dict[str, object]) -> None:
    hashes = _native.block_hashes(
        bytes.fromhex(str(case["identity"])),
        case["tenant"],  # type: ignore[arg-type]
        case["block_size"],  # type: ignore[arg-type]
        case["tokens"],  # type: ignore[arg-type]
    )
    assert [value.hex() for value in hashes] == case["hashes"]


def test_bad_arguments_are_python_errors() -> None:
    with pytest.raises(ValueError, match="block_size_tokens is 0"):
        _native.block_hashes(bytes(16), "", 0, [1])
    with pytest.raises(ValueError, match="16"):
        _native.block_hashes(bytes(15), "", 16, [1])


@pytest.mark.parametrize(
    ("arguments", "code"), [(["--help"], 0), (["--version"], 0), ([], 2), (["--nonsense"], 2)]
)
def test_command_line_errors_are_exit_codes(
    arguments: list[str], code: int, capfd: pytest.CaptureFixture[str]
) -> None:
    assert _native.run_router(arguments) == code
    shown = capfd.readouterr()
    assert "tasuki router" in (shown.out if code == 0 else shown.err)


def test_a_folder_that_is_no_model_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code = _native.run_router(["--model", str(tmp_path), "--worker", "127.0.0.1:1", "--port", "0"])
    assert code == 1
    shown = capfd.readouterr().err
    assert str(tmp_path) in shown and "tokenizer.json" in shown
