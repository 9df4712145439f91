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


def lane_of(nodeid: str) -> str:
    """What must run together: all tests of whole systems, or one file."""
    file = nodeid.split("::")[0]
    return "systems" if file.split("/")[1] in _SYSTEMS else file


class Lanes(LoadScopeScheduling):
    """Gives whole lanes to xdist's workers."""

    def _split_scope(self, nodeid: str) -> str:
        return lane_of(nodeid)


class LanePlugin:
    """Schedules by lane; lowers the priority of a worker that takes other tests."""

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> Lanes:
        return Lanes(config, log)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> None:
        in_worker = "PYTEST_XDIST_WORKER" in os.environ
        if in_worker and lane_of(item.nodeid) != "systems":
            os.setpriority(os.PRIO_PROCESS, 0, _LOW_PRIORITY)
