"""One run of `tasuki bench serve` as a child process, and what comes of it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasuki.bench.arguments import secrets_apart, words
from tasuki.bench.child import end_child, explain, start_child
from tasuki.bench.errors import NothingAnsweredError, RunFailedError
from tasuki.bench.header import read_result
from tasuki.launch.process import describe_exit

_END_GRACE_S = 20.0


@dataclass(frozen=True, slots=True)
class LoadRun:
    """What to run.

    Attributes:
        url: Of the server.
        model: As requests call it; None: the first that the server lists.
        options: Of `tasuki bench serve`, by name.
        topology: The block of the result file; None: unknown.
        label: Names the line in plots; None: unnamed.
        result: Where the result goes.
        log: Gets the output.
        timeout_s: It has failed when it takes longer.
    """

    url: str
    model: str | None
    options: Mapping[str, Any]
    topology: Mapping[str, Any] | None
    label: str | None
    result: Path
    log: Path
    timeout_s: float


def run_load(run: LoadRun, defaults: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Run it to its end; the result file is there when it was measured whole.

    Args:
        run: What to run.
        defaults: Further options, where the run does not say them.

    Returns:
        The result.

    Raises:
        NothingAnsweredError: It ran, and every request failed.
        RunFailedError: It could not run, took too long, or was interrupted.
    """
    part = run.result.with_name(run.result.name + ".part")
    part.parent.mkdir(parents=True, exist_ok=True)
    part.unlink(missing_ok=True)
    said: dict[str, Any] = {
        **(defaults or {}),
        "base-url": run.url,
        "model": run.model,
        "label": run.label,
        "output": part,
    }
    if run.topology is not None:
        said["topology"] = json.dumps(run.topology)
    options, environment = secrets_apart({**said, **run.options})
    process = start_child(["bench", "serve", *words(options)], run.log, environment)
    try:
        code = process.wait(run.timeout_s)
    except subprocess.TimeoutExpired as error:
        raise RunFailedError(f"took longer than {run.timeout_s:g} s (timeout_s)") from error
    finally:
        end_child(process, _END_GRACE_S)
    if code != 0 and not part.exists():
        raise _ended(code, run.log)
    result = read_result(part, "serve")
    if result.get("interrupted"):
        raise RunFailedError("the run was interrupted")
    if not result["metrics"]["completed"]:
        reasons = [f"{each['count']} x {each['first']}" for each in result.get("failures", ())]
        raise NothingAnsweredError(f"no request was answered: {'; '.join(reasons)}", result)
    if code != 0:
        raise _ended(code, run.log)
    part.replace(run.result)
    return result


def _ended(code: int, log: Path) -> RunFailedError:
    return RunFailedError(f"tasuki bench serve ended ({describe_exit(code)}): {explain(log)}")
