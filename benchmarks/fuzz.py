"""Runs `make fuzz` and keeps how many cases of each target passed.

python benchmarks/fuzz.py --seconds 300 --out benchmarks/results/fuzz.json
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from pathlib import Path

from tasuki.bench.header import header, write_result

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    """Run it; a failure of any case ends this too."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=300, help="of all targets together")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    seconds = str(options.seconds)
    subprocess.run(["make", "fuzz"], cwd=ROOT, env=os.environ | {"FUZZ_S": seconds}, check=True)
    counts = (ROOT / "target" / "fuzz.jsonl").read_text().splitlines()
    targets = [json.loads(line) for line in counts]
    result = header("fuzz", label="fuzz", topology=None, model="")
    result["targets"] = targets
    result["cases"] = sum(target["cases"] for target in targets)
    write_result(options.out, result)
    print(f"{result['cases']:,} cases, none failed")


if __name__ == "__main__":
    main()
