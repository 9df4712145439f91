"""What another ratio would give: a Tasuki router's request log, replayed with it.

`tasuki simulate` replays; how far it is off before what really ran is told beside its answer.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasuki.doctor.result import DoctorError

_LIMIT_S = 300.0  # for one replay
_TOLD = "e2e_p95_ms"
_FAIL_MORE = 1.0  # of all requests, in percent; times are of the others alone


def advice(log: Path, prefill: int, decode: int) -> str:
    """The best other way to divide the workers, in words for a remedy.

    Args:
        log: Of `--request-log`.
        prefill: Workers of that role now.
        decode: Of that one.

    Raises:
        DoctorError: The log cannot be replayed.
    """
    others: dict[str, tuple[str, ...]] = {
        f"{p}:{d}": ("--prefill", str(p), "--decode", str(d))
        for p, d in ((prefill + 1, decode - 1), (prefill - 1, decode + 1))
        if p > 0 and d > 0
    }
    others[f"{prefill + decode} mixed workers"] = ("--mixed", str(prefill + decode))
    said = {name: _replay(log, words) for name, words in others.items()}
    return best(said)


def best(said: Mapping[str, Mapping[str, Any]]) -> str:
    """The same from the replays' reports.

    Args:
        said: What `tasuki simulate LOG --json` said of each way; at least one.
    """
    served = {name: report for name, report in said.items() if _says_all(report)}
    if not served:
        return "no other ratio serves the requests of your log in its replay; add workers"
    name = min(served, key=lambda each: float(served[each]["change_percent"][_TOLD]))
    change, off = served[name]["change_percent"], float(served[name]["trust"]["median_percent"])
    told = (
        f"{change[_TOLD]:+.0f}% end-to-end time (p95) and {change['requests_per_s']:+.0f}% requests"
        f" per second, by a replay of your own log that is {off:.0f}% off in the median"
    )
    if -float(change[_TOLD]) > off:
        return f"{name} would give {told}"
    return f"no other ratio is surely better: {name} would give {told}; add workers"


def _says_all(report: Mapping[str, Any]) -> bool:
    """Whether requests were served in both replays, as many: else there is nothing to compare."""
    change, off = report["change_percent"], report["trust"]["median_percent"]
    if float(change.get("failed_percent", 0.0)) > _FAIL_MORE:
        return False
    return None not in (off, change.get(_TOLD), change.get("requests_per_s"))


def _replay(log: Path, words: tuple[str, ...]) -> dict[str, Any]:
    command = [sys.executable, "-m", "tasuki", "simulate", str(log), *words, "--json"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S)
    except subprocess.TimeoutExpired as error:
        raise DoctorError(
            f"{log}: not replayed within {_LIMIT_S:g} s: give a part of it, such as one of its"
            " rotated files"
        ) from error
    if done.returncode != 0:
        raise DoctorError(f"{log} cannot be replayed: {done.stderr.strip()}")
    return dict(json.loads(done.stdout[: done.stdout.rindex("}") + 1]))
