"""How long `tasuki serve` takes until it is ready, and where that time goes.

The first start is not counted: it measures dtypes and fills the cache of files. For each other
one: `ready` is from the command to the line with the URL, `workers` until the last worker is
ready, and each worker's own account is in its log (`started in`), of which the slowest counts.

    python benchmarks/start.py --out benchmarks/results/start.json
    python benchmarks/start.py --mixed 1      # other arguments go to `tasuki serve`
    python benchmarks/start.py --model FOLDER --cold

`--cold` adds one start after the model's files have left the page cache.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tasuki.bench.header import header, write_result

_DEADLINE_S = 300.0
_READY = re.compile(r"^Serving .* at http://", re.M)
_ACCOUNT = re.compile(r"started in ([\d.]+) s: (.*)$", re.M)


def start(arguments: Sequence[str]) -> dict[str, float]:
    """Seconds of the parts of one start."""
    with tempfile.TemporaryDirectory() as name:
        logs, output = Path(name) / "logs", Path(name) / "output"
        workers = logs / "workers.txt"  # what the router reads; empty until all are ready
        command = [sys.executable, "-m", "tasuki", "serve", "--port", "0", "--log-dir", str(logs)]
        begun_s = time.monotonic()
        with output.open("w") as handle:
            process = subprocess.Popen([*command, *arguments], stdout=handle, stderr=handle)
        parts: dict[str, float] = {}
        while not _READY.search(output.read_text()):
            elapsed_s = time.monotonic() - begun_s
            if process.poll() is not None or elapsed_s > _DEADLINE_S:
                raise SystemExit(f"it does not start:\n{output.read_text()}")
            if "workers" not in parts and workers.exists() and workers.stat().st_size > 0:
                parts["workers"] = elapsed_s
            time.sleep(0.01)
        parts["ready"] = time.monotonic() - begun_s
        process.send_signal(signal.SIGINT)
        process.wait(_DEADLINE_S)
        accounts = [
            found
            for log in logs.glob("*.log")
            if (found := _ACCOUNT.search(log.read_text())) is not None
        ]
        slowest = max(accounts, key=lambda found: float(found[1]))
        parts["slowest worker"] = float(slowest[1])
        for part in slowest[2].split(", "):
            phase, took = part.rsplit(" ", 1)
            parts[f"slowest worker: {phase}"] = float(took)
        return parts


def forget(folder: Path) -> None:
    """Ask the system to drop a model's files from its page cache."""
    for file in folder.iterdir():
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    """Start it, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--starts", type=int, default=3, help="that count")
    parser.add_argument("--model", default="smollm2-135m", help="as `tasuki serve` takes it")
    parser.add_argument("--cold", action="store_true", help="one start more, files not cached")
    parser.add_argument("--out", type=Path)
    options, others = parser.parse_known_args()
    folder = Path(options.model)
    if options.cold and not folder.is_dir():
        parser.error(f"--cold needs a folder as --model, not {options.model!r}")
    arguments = ["--model", options.model, *others]
    start(arguments)
    starts = [start(arguments) for _ in range(options.starts)]
    median = {part: round(statistics.median(s[part] for s in starts), 2) for part in starts[0]}
    measured: dict[str, Any] = {"arguments": arguments, "median_s": median, "starts_s": starts}
    if options.cold:
        forget(folder)
        measured["cold_s"] = start(arguments)
    for part, took_s in median.items():
        cold = f" {measured['cold_s'][part]:6.2f} s cold" if options.cold else ""
        print(f"{part:<32} {took_s:6.2f} s{cold}")
    if options.out is not None:
        about = header("start", label="start", topology=None, model=folder.name)
        if options.cold:
            weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
            about["weights_bytes"] = weights
        write_result(options.out, {**about, **measured})


if __name__ == "__main__":
    main()
