"""Refuses result files that no program wrote, or that were edited afterwards.

A file of `benchmarks/results` is written by `tasuki.bench.header.write_result`: it carries
its command, commit, versions and machine, and a digest of all of it. Files from before there
were digests are pinned here by their SHA-256. That list only gets shorter: a benchmark that
is run again replaces its file with one that carries a digest.

Usage: check_results.py [FILE...]
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

from tasuki.bench.provenance import DIGEST, digest

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"
NEEDED = ("schema", "kind", "created", "command", "git_revision", "git_dirty", "versions")
OLD = {
    "clients_on_a_real_server.json": (
        "0aaaf597ab37bf29cc2a8ec6bd6b0ab921255d28d3ec017fc027176cc40838d4"
    ),
    "cpu_floors.json": ("d9dfd4314fa7474ed3bb01a2b144d69058f2d6485d31806fcca2da1d38df5fc6"),
    "gpu_busy.json": ("cc3b653d6454f2ef8a86ec12aed7fb86af06c15704057ec69a9b96fc238d9c12"),
    "gpu_fallback.json": ("86ef4063071b1f953c756aaa82590437e0386753cd2349ef659106ae67a21462"),
    "gpu_load.json": ("4d24af018cfd5f0f0b236e06977d612d2aae047974f54112b873ed72f04a44c7"),
    "gpu_mixed_steps.json": ("dbeaea84263c8a7bb2ca83ec9ee6288d67c18e38e5e60c592faabcc7b91d5979"),
    "gpu_steps.json": ("11dd818f3e261763718154b9cc37029a2a7c3cf8d6ebc4a4b9ad03626f27744b"),
    "gpu_tensor_parallel.json": (
        "b7588af0eec8f659b8a212f11ee6761e2caebf7ef769d769cce9a2b19b39ccb0"
    ),
    "gpu_tensor_parallel_4.json": (
        "0134986177ca3821054cb8f4ac4ad4cf7897e5607e612e7f582c7dd011fd287b"
    ),
    "handoff_nvlink.json": ("254376a81e521fa485b2bca20d78dd83f2f99072848e5d0887ba9f4d3957de8b"),
    "peers_2xh200.json": ("f7b502a651e2546bc8b6cfab860ca3da3a5caa9b50221ed2a603154b973f00da"),
    "serve_w1_w2.json": ("8e936430131d30ef9e44dc9e60df2f96198098a1567bb7b93b4c37f524bd18c7"),
}


def fault(path: Path) -> str | None:
    """What is wrong with one result file; None: nothing."""
    text = path.read_bytes()
    if path.name in OLD:
        same = hashlib.sha256(text).hexdigest() == OLD[path.name]
        if same:
            return None
    try:
        result = json.loads(text)
    except ValueError as error:
        return f"is not JSON: {error}"
    if not isinstance(result, dict) or DIGEST not in result:
        return "has no digest: write it with tasuki.bench.header.write_result"
    missing = [name for name in (*NEEDED, "machine") if name not in result]
    if missing:
        return f"lacks {', '.join(missing)}: begin it with tasuki.bench.header.header"
    if digest(result) != result[DIGEST]:
        return "was edited after it was written: run its command again"
    return None


def main(arguments: list[str]) -> int:
    """Check the files named, or all of benchmarks/results."""
    paths = [Path(word) for word in arguments] or sorted(RESULTS.glob("*.json"))
    faults = [(path, found) for path in paths if (found := fault(path)) is not None]
    faults += [
        (RESULTS / name, "is gone: take its line out of OLD, here")
        for name in OLD
        if not arguments and not (RESULTS / name).exists()
    ]
    for path, found in faults:
        print(f"{path.name} {found}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
