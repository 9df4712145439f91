"""What the pages point at is there: pages, headings, make's targets, commands and options."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
PAGES = [
    *CHECKOUT.glob("*.md"),
    *(CHECKOUT / "docs").glob("*.md"),
    CHECKOUT / "benchmarks/RESULTS.md",
]
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"\btasuki ((?:bench |model )?[a-z]+)((?: +[^`\n|'\"]+)?)")


def headings(page: Path) -> set[str]:
    """As links name them."""
    found = re.findall(r"^#+ (.*)$", FENCED.sub("", page.read_text()), re.MULTILINE)
    plain = (re.sub(r"[`*\[\]]|\]?\([^)]*\.md[^)]*\)", "", each).strip().lower() for each in found)
    return {re.sub(r"[^\w\- ]", "", each).replace(" ", "-") for each in plain}


def dead_links(page: Path) -> Iterator[str]:
    for link in re.findall(r"\]\(([^)\s]+)\)", FENCED.sub("", page.read_text())):
        path, _, heading = link.partition("#")
        target = page.parent / path if path else page
        if "://" in link or link.startswith("mailto:"):
            continue
        there = target.exists() and (not heading or heading in headings(target))
        if not there:
            yield link


def unknown_options(page: Path) -> Iterator[str]:
    for name, rest in COMMAND.findall(page.read_text().replace("\\\n", " ")):
        for option in re.findall(r"(?<!\S)--[a-z][a-z0-9-]*", rest):
            if option not in options(name):
                yield f"tasuki {name} {option}"


@functools.cache
def options(command: str) -> set[str]:
    """Of a command, as its help says; of one that does not exist none."""
    wide = {**os.environ, "COLUMNS": "300", "NO_COLOR": "1"}
    asked = [sys.executable, "-m", "tasuki", *command.split(), "--help"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False, env=wide)
    return set(re.findall(r"--[a-z][a-z0-9-]*", done.stdout)) if done.returncode == 0 else set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    assert not list(dead_links(page))


@pytest.mark.system
def test_commands_have_the_options_that_pages_name() -> None:
    named = {page.name: sorted(set(unknown_options(page))) for page in PAGES}
    assert {name: found for name, found in named.items() if found} == {}
    assert "--mixed" in options("serve")


def test_targets_of_make_are_there() -> None:
    targets = set(
        re.findall(r"^([a-z][a-z-]*):", (CHECKOUT / "Makefile").read_text(), re.MULTILINE)
    )
    named = {
        name for page in PAGES for name in re.findall(r"`make ([a-z][a-z-]*)", page.read_text())
    }
    assert {"demo", "quick"} <= named <= targets


def test_every_marker_of_tests_is_described() -> None:
    settings = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())
    there = {line.split(":")[0] for line in settings["tool"]["pytest"]["ini_options"]["markers"]}
    page = (CHECKOUT / "CONTRIBUTING.md").read_text()
    table = page[page.index("| marker |") :].partition("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == there


@pytest.mark.system
def test_what_is_not_there_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# One `two`\n[a](#one-two) [b](#three) [c](gone.md)\n"
        "`tasuki serve --mixed 1 --no-such` and `tasuki nothing --port 1`\n"
    )
    assert list(dead_links(page)) == ["#three", "gone.md"]
    assert list(unknown_options(page)) == ["tasuki serve --no-such", "tasuki nothing --port"]
