"""Prints the time of each folder of tests just before pytest's own last line."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import pytest


class TimeByFolder:
    """A pytest plugin. Shared fixtures count where they are first set up."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._tests: dict[str, set[str]] = defaultdict(set)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        folder = report.nodeid.split("::")[0].rpartition("/")[0]
        self._seconds[folder] += report.duration
        self._tests[folder].add(report.nodeid)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> Iterator[None]:
        result = yield
        terminalreporter.section("time by folder", sep="=")
        for folder, seconds in sorted(self._seconds.items(), key=lambda item: -item[1]):
            terminalreporter.line(f"{seconds:8.1f} s  {len(self._tests[folder]):5}  {folder}")
        return result
