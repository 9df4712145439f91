"""The scripts of `examples` run as they are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.deployment import Deployment
from support.processes import REPOSITORY, environment

pytestmark = pytest.mark.system
EXAMPLES = REPOSITORY / "examples"


def run(*command: str | Path, **variables: str) -> str:
    done = subprocess.run(
        command, env=environment(**variables), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_chat_streams_an_answer_and_tells_where_the_time_went(deployment: Deployment) -> None:
    question = "What is the capital of France? Answer in one sentence."
    said = run(
        sys.executable,
        EXAMPLES / "chat.py",
        question,
        TASUKI_URL=deployment.url,
        NO_PROXY="127.0.0.1",
    )
    answer, _, timings = said.partition("\n\n")
    assert "Paris" in answer
    phases = dict(line.split(maxsplit=1) for line in timings.splitlines())
    assert float(phases["total_ms"]) >= float(phases["first_token_ms"]) > 0


def test_which_split_plans_every_split_and_draws_it(tiny_model: Path, tmp_path: Path) -> None:
    """What it asks `tasuki bench sweep` for is planned here, not measured."""
    command = tmp_path / "tasuki"
    command.write_text(
        "#!/bin/sh\n"
        f'[ "$1" = bench ] && exec {sys.executable} -m tasuki "$@" --dry-run\n'
        'echo "$@"\n'
    )
    command.chmod(0o755)
    out = tmp_path / "out"
    said = run(
        "bash",
        EXAMPLES / "which_split.sh",
        tiny_model,
        "24:4",
        "ttft=60s,tpot=1s",
        "3",
        OUT=str(out),
        PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
    )
    planned, drawn = said.splitlines()[:-2], said.splitlines()[-2]
    assert {line.partition("/")[0] for line in planned} == {"3m", "1p2d", "2p1d"}
    assert drawn == f"plot {out} --out {out}/plots"
