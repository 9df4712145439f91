"""Command lines and output with letters that are no UTF-8, or that the locale lacks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import environment

pytestmark = pytest.mark.system

ODD = b"caf\xe9"  # in Latin-1


def run(words: list[str | bytes], **variables: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "tasuki", *words],
        capture_output=True,
        timeout=60,
        env={**environment(), **variables},
    )


@pytest.mark.parametrize(
    "words",
    [
        ["simulate", "--steps"],
        ["plan", "--steps"],
        ["bench", "serve", "--output"],
        ["router", "--workers-file"],
    ],
    ids=lambda words: words[-2],
)
def test_a_name_that_a_command_in_rust_cannot_take_is_refused(words: list[str | bytes]) -> None:
    done = run([*words, ODD])
    assert done.returncode == 1
    assert done.stderr.decode() == (
        f"tasuki: error: {ODD!r} is no UTF-8, which this command requires: rename the file or the"
        " folder\n"
    )


def test_a_folder_is_printed_as_it_is_named(tmp_path: Path) -> None:
    folder = os.fsencode(tmp_path) + b"/" + ODD
    os.mkdir(folder)
    Path(os.fsdecode(folder), "config.json").write_text("{}")
    done = run(["model", "path", folder], PYTHONIOENCODING="utf-8")
    assert (done.returncode, done.stdout, done.stderr) == (0, folder + b"\n", b"")


def test_the_help_is_shown_where_the_locale_lacks_its_letters() -> None:
    done = run(["linkbench", "--help"], PYTHONIOENCODING="latin-1")
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"\\u2026" in done.stdout


def test_output_that_has_become_a_pipe_takes_all_text_too(tmp_path: Path) -> None:
    """As that of a worker that the fork server forked."""
    code = (
        "import os, sys; from tasuki.command_line import print_all_letters;"
        "read, write = os.pipe();"
        "os.dup2(write, 1); print_all_letters(); print('caf\\udce9', flush=True);"
        "os.write(2, os.read(read, 99))"
    )
    with (tmp_path / "out").open("w") as out:
        done = subprocess.run(
            [sys.executable, "-c", code],
            stdout=out,
            stderr=subprocess.PIPE,
            timeout=60,
            env={**environment(), "PYTHONIOENCODING": "utf-8"},
        )
    assert (done.returncode, done.stderr) == (0, ODD + b"\n")
