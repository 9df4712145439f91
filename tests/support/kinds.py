"""Markers of tests by what they do, and a guard that keeps the markers true.

`system` tests start processes; `interpreter` tests run Triton kernels in
Triton's interpreter. Tests get the marker here by their folder, their fixtures
or because their module imports `support.kernels.DEVICE`; others name it
themselves. A test that starts a process or interprets a kernel without the
marker fails, so `make quick` stays quick.

This is a pytest plugin: `tests/conftest.py` registers it.
"""

from __future__ import annotations

import multiprocessing.process
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

SYSTEM_FOLDERS = {"e2e", "faults"}
# `default_model` is among them because fetching the model runs pip.
SYSTEM_FIXTURES = {"deploy", "deploy_for_module", "deployment", "tiny", "default_model"}
PROCESS_EVENTS = {
    "os.fork",
    "os.forkpty",
    "os.posix_spawn",
    "os.spawn",
    "os.system",
    "subprocess.Popen",
    "support.fork",
}
# Programs that only answer a question at once: for result files, and for Matplotlib, which
# lists the fonts of a machine when it first draws there.
HARMLESS_PROGRAMS = {"fc-list", "git", "nvidia-smi"}


class UnmarkedError(AssertionError):
    """A test did what only tests with a certain marker may do."""


def mark_all_but_a_cover(cases: list[pytest.Item]) -> None:
    """Marks cases of one interpreted test `long`, but for one of each value of each parameter."""

    def new(case: pytest.Item) -> set[tuple[str, str]]:
        values = case.callspec.params if hasattr(case, "callspec") else {"": None}
        return {(name, repr(value)) for name, value in values.items()} - covered

    covered: set[tuple[str, str]] = set()
    while new(best := max(cases, key=lambda case: len(new(case)))):
        covered |= new(best)
        cases.remove(best)
        if not cases:
            return
    for case in cases:
        case.add_marker(pytest.mark.long)


class Kinds:
    """Gives the markers, and watches the running test."""

    def __init__(self) -> None:
        self._running: pytest.Item | None = None
        self._errors: list[str] = []
        self._undo: list[Callable[[], None]] = []

    def pytest_configure(self) -> None:
        sys.addaudithook(self._on_audit_event)  # stays for the life of the process
        start = multiprocessing.process.BaseProcess.start  # "spawn" raises no audit event
        self._wrap(multiprocessing.process.BaseProcess, "start", start, "system")

    def pytest_unconfigure(self) -> None:
        for undo in self._undo:
            undo()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        tests = Path(__file__).parents[1]
        kernels = sys.modules.get("support.kernels")
        interpreted: dict[str, list[pytest.Item]] = defaultdict(list)
        for item in items:
            device = getattr(getattr(item, "module", None), "DEVICE", None)
            if kernels is not None and device is kernels.DEVICE:
                item.add_marker(pytest.mark.interpreter)
                interpreted[item.nodeid.partition("[")[0]].append(item)
            folder = item.path.relative_to(tests).parts[0]
            if folder in SYSTEM_FOLDERS or SYSTEM_FIXTURES & set(getattr(item, "fixturenames", ())):
                item.add_marker(pytest.mark.system)
        for cases in interpreted.values():
            mark_all_but_a_cover(cases)

    def pytest_collection_finish(self) -> None:
        interpreter = sys.modules.get("triton.runtime.interpreter")
        if interpreter is not None:
            executor = interpreter.GridExecutor
            self._wrap(executor, "__call__", executor.__call__, "interpreter")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._running = item
        try:
            return (yield)
        finally:
            self._running = None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self) -> Iterator[None]:
        """A test may have swallowed the error: it fails here all the same."""
        try:
            return (yield)
        finally:
            errors, self._errors = self._errors, []
            if errors:
                pytest.fail(errors[0], pytrace=False)

    def _on_audit_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in PROCESS_EVENTS:
            return
        if event == "subprocess.Popen" and Path(arguments[0]).name in HARMLESS_PROGRAMS:
            return
        self._require("system", event)

    def _require(self, marker: str, what: str) -> None:
        item = self._running
        # `make quick` leaves GPU tests out as they are.
        if item is None or item.get_closest_marker("gpu") is not None:
            return
        if item.get_closest_marker(marker) is None:
            error = f"{item.nodeid} calls {what}: mark it with @pytest.mark.{marker}"
            self._errors.append(error)
            raise UnmarkedError(error)

    def _wrap(self, owner: type, name: str, original: Callable[..., Any], marker: str) -> None:
        def checked(*arguments: Any, **keywords: Any) -> Any:
            self._require(marker, f"{owner.__name__}.{name}")
            return original(*arguments, **keywords)

        setattr(owner, name, checked)
        self._undo.append(lambda: setattr(owner, name, original))
