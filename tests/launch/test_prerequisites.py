"""What is missing on a machine is named, in one line each, before anything long begins."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.system

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "check_prerequisites.sh"
TOOLS = ("sh", "uname", "dirname", "sed", "cut", "sort", "head")


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A machine on which everything is there, but nothing else."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in TOOLS:
        found = shutil.which(name)
        assert found is not None
        (folder / name).symlink_to(found)
    put(folder, "python3", f'exec {sys.executable} "$@"')
    put(folder, "cc", "exit 0")
    put(folder, "cargo", "exit 0")
    put(folder, "rustc", "echo 'rustc 1.99.0 (abcdef 2026-01-01)'")
    return folder


def put(folder: Path, name: str, body: str) -> None:
    script = folder / name
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(0o755)


def check(folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": str(folder), "HOME": os.environ.get("HOME", "/")}
    command = [str(folder / "sh"), str(SCRIPT)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def test_a_complete_machine_passes_and_the_python_is_named(tools: Path) -> None:
    done = check(tools)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(tools / "python3")
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("name", "body", "said"),
    [
        ("rustc", "echo 'rustc 1.70.0 (abcdef 2023-01-01)'", "Rust 1.89 or newer (rustc is 1.70.0"),
        ("cargo", None, "cargo, Rust 1.89 or newer"),
        ("cc", None, "a C compiler"),
        ("python3", "echo Python 3.9.2; exit 1", "Python 3.11 to 3.14 (python3 is Python 3.9.2)"),
    ],
)
def test_what_is_missing_is_named_in_one_line(
    tools: Path, name: str, body: str | None, said: str
) -> None:
    if body is None:
        (tools / name).unlink()
    else:
        put(tools, name, body)
    done = check(tools)
    assert done.returncode == 1
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("setup: missing: ")
    assert said in lines[0]


def test_everything_that_is_missing_is_named_at_once(tools: Path) -> None:
    for name in ("cc", "cargo", "python3"):
        (tools / name).unlink()
    done = check(tools)
    assert done.returncode == 1
    assert len([x for x in done.stderr.splitlines() if x.startswith("setup: missing: ")]) == 3
