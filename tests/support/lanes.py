"""Two lanes of tests side by side under pytest-xdist (`pytest -n 2`).

Tests of the folders that start whole systems run one after another in one lane: their
workers and routers need the processor at once, and they share deployments. The files of all
other folders are taken in turn by the other lane, at low priority, and by the first one when
it is done.

This is a pytest plugin: `tests/conftest.py` registers it. Without `-n` it does nothing.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

_SYSTEMS = {"bench", "cluster", "e2e", "faults", "launch", "parity", "router", "worker"}
_LOW_PRIORITY = 10
# Until a test at low priority counts as hung. Beside four busy processes on two cores it gets a
# tenth of its time: a test of 30 s ran into the limit of `pyproject.toml`.
_LOW_PRIORITY_TIMEOUT_S = 900


def lane_of(nodeid: str) -> str:
    """What must run together: all tests of whole systems, or one file."""
    file = nodeid.split("::")[0]
    return "systems" if file.split("/")[1] in _SYSTEMS else file


class Lanes(LoadScopeScheduling):
    """Gives whole lanes to xdist's workers."""

    def _split_scope(self, nodeid: str) -> str:
        return lane_of(nodeid)


class LanePlugin:
    """Schedules by lane; gives other tests a low priority and more time."""

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> Lanes:
        return Lanes(config, log)

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        if "PYTEST_XDIST_WORKER" not in os.environ or config.getoption("timeout") is not None:
            return
        for item in items:
            if lane_of(item.nodeid) != "systems" and not item.get_closest_marker("timeout"):
                item.add_marker(pytest.mark.timeout(_LOW_PRIORITY_TIMEOUT_S))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> None:
        in_worker = "PYTEST_XDIST_WORKER" in os.environ
        if in_worker and lane_of(item.nodeid) != "systems":
            os.setpriority(os.PRIO_PROCESS, 0, _LOW_PRIORITY)
