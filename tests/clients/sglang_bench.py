"""SGLang's own load generator against the server, unchanged.

It asks for the model and its tokenizer, warms the server up, empties its caches, sends requests
to /generate and prints what it measured.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile

COMMAND = """
-m sglang.bench_serving --backend sglang --dataset-name random-ids --num-prompts 8
--random-input 64 --random-output 24 --random-range-ratio 0.5 --max-concurrency 2
--flush-cache --cache-report
"""
SUCCESSFUL = re.compile(r"Successful requests: +(\d+)")
REQUESTS = 8


def main() -> int:
    """1 if not all requests got an answer."""
    command = [sys.executable, *COMMAND.split(), "--base-url", os.environ["TASUKI_URL"]]
    command += ["--tokenizer", os.environ["TASUKI_MODEL_FOLDER"]]
    with tempfile.TemporaryDirectory() as folder:  # it leaves a file of its results
        ran = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    successful = SUCCESSFUL.search(ran.stdout)
    if ran.returncode or successful is None or int(successful[1]) != REQUESTS:
        print(ran.stdout[-2000:], ran.stderr[-2000:], sep="\n")
        return 1
    print(f"sglang.bench_serving: {REQUESTS} requests, flush and report")
    return 0


if __name__ == "__main__":
    sys.exit(main())
