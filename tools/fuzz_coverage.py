"""Prints which lines of the parsers the Rust fuzz targets execute.

FUZZ_S=60 python tools/fuzz_coverage.py

Compiles the workspace's crates with rustc's coverage counters (other crates as they are), runs
the targets of `make fuzz`, and prints a table of the lines of the files that read what others
send. Needs rustup's component `llvm-tools`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROFILES = ROOT / "target" / "fuzz-coverage"
TARGETS = 7
PARSERS = {
    "HTTP bodies and fields": "crates/router/src/openai/",
    "tool calls and reasoning": "crates/router/src/openai/calls/",
    "grammars": "crates/router/src/grammar/",
    "streams of vLLM and SGLang": "crates/router/src/workers/foreign/",
    "answers of vLLM and SGLang": "crates/router/src/foreign/",
    "their HTTP/1.1": "crates/http1/src/",
    "messages of workers": "crates/router/src/workers/wire",
    "requests' state machine": "crates/flow/src/machine/",
    "registry of workers": "crates/flow/src/fleet/",
    "templates, text": "crates/text/src/",
}
"""Part of the source, by the longest beginning of a file's path; tests are left out."""


class CoverageError(Exception):
    """A tool or a part of the source is not there."""


def main() -> None:
    """Build, run, print."""
    PROFILES.mkdir(parents=True, exist_ok=True)
    for old in PROFILES.glob("*.profraw"):
        old.unlink()
    seconds = int(os.environ.get("FUZZ_S", "300"))
    environment = os.environ | {
        "RUSTC_WORKSPACE_WRAPPER": str(ROOT / "tools" / "rustc_coverage.sh"),
        "LLVM_PROFILE_FILE": str(PROFILES / "%p-%m.profraw"),
        "TASUKI_FUZZ_S": str(seconds // TARGETS),
    }
    packages = [word for name in ("router", "http1", "text") for word in ("-p", f"tasuki-{name}")]
    packages += ["--lib", "--test", "fuzz"]
    binaries = built(["cargo", "test", *packages, "--no-run", "--message-format", "json"])
    run = ["cargo", "test", "--quiet", *packages, "fuzzed_", "--", "--test-threads", "1"]
    subprocess.run([*run, "--nocapture"], cwd=ROOT, env=environment, check=True)
    print_table(lines_by_file(binaries))


def built(command: list[str]) -> list[str]:
    """The test programs that a build made."""
    environment = os.environ | {
        "RUSTC_WORKSPACE_WRAPPER": str(ROOT / "tools" / "rustc_coverage.sh")
    }
    done = subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE)
    messages = (json.loads(line) for line in done.stdout.splitlines())
    return [message["executable"] for message in messages if message.get("executable")]


def llvm_tool(name: str) -> str:
    """A tool of the compiler's own LLVM."""
    sysroot = subprocess.check_output(["rustc", "--print", "sysroot"], text=True).strip()
    found = list(Path(sysroot).glob(f"lib/rustlib/*/bin/{name}"))
    if not found:
        raise CoverageError(f"{name} is not in {sysroot}: rustup component add llvm-tools")
    return str(found[0])


def lines_by_file(binaries: list[str]) -> dict[str, tuple[int, int]]:
    """Lines of each file of the workspace: all that have code, and those that were executed."""
    merged = PROFILES / "merged.profdata"
    raw = [str(path) for path in PROFILES.glob("*.profraw")]
    merge = [llvm_tool("llvm-profdata"), "merge", "--sparse", *raw, "--output", str(merged)]
    subprocess.run(merge, check=True)
    objects = [word for binary in binaries for word in ("--object", binary)]
    export = [llvm_tool("llvm-cov"), "export", "--format", "lcov", "--instr-profile", str(merged)]
    lines: dict[str, tuple[int, int]] = {}
    path, end = "", 0
    for record in subprocess.check_output([*export, *objects], text=True).splitlines():
        kind, _, value = record.partition(":")
        if kind == "SF":
            own = Path(value).is_relative_to(ROOT) and "test" not in Path(value).name
            path, end = str(Path(value).relative_to(ROOT)) if own else "", tests_begin(Path(value))
        elif kind == "DA" and path:
            line, count = value.split(",")[:2]
            if int(line) < end:
                all_lines, executed = lines.get(path, (0, 0))
                lines[path] = (all_lines + 1, executed + (count != "0"))
    return lines


def tests_begin(path: Path) -> int:
    """The line at which a file's own unit tests begin, which no fuzz target runs."""
    source = path.read_text().splitlines() if path.is_file() else []
    tests = [line for line, text in enumerate(source, 1) if text == "mod tests {"]
    return tests[0] if tests else len(source) + 1


def print_table(lines: dict[str, tuple[int, int]]) -> None:
    """The parts, and the files of each."""
    parts: dict[str, list[str]] = defaultdict(list)
    for path in sorted(lines):
        fitting = [part for part, begin in PARSERS.items() if path.startswith(begin)]
        if fitting and "tests/" not in path:
            parts[max(fitting, key=lambda part: len(PARSERS[part]))].append(path)
    if missing := [part for part in PARSERS if part not in parts]:
        raise CoverageError(f"no file of {missing}: correct PARSERS in {__file__}")
    revision = ["git", "describe", "--always", "--dirty"]
    print("revision", subprocess.check_output(revision, cwd=ROOT, text=True).strip())
    print(f"{'lines':>7} {'executed':>9} {'%':>4}")
    for part in PARSERS:
        print_row(part.upper(), [lines[path] for path in parts[part]])
        for path in parts[part]:
            print_row(f"  {path}", [lines[path]])
    print_row("ALL", [lines[path] for paths in parts.values() for path in paths])


def print_row(name: str, counts: list[tuple[int, int]]) -> None:
    """One line of the table: of these files together."""
    count, covered = (sum(column) for column in zip(*counts, strict=True))
    print(f"{count:>7} {covered:>9} {100 * covered // max(1, count):>3}% {name}")


if __name__ == "__main__":
    try:
        main()
    except CoverageError as error:
        sys.exit(f"error: {error}")
