"""Tests that run side by side, in two lanes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PLUGIN = """
from support.lanes import LanePlugin

def pytest_configure(config):
    config.pluginmanager.register(LanePlugin())
"""
SYSTEM = """
def test_system(request):
    assert not request.node.get_closest_marker("timeout"), "that of the configuration"
"""
OTHER = """
import pytest

def test_without_a_limit(request):
    assert request.node.get_closest_marker("timeout").args == (900,)

@pytest.mark.timeout(60)
def test_with_a_limit(request):
    assert request.node.get_closest_marker("timeout").args == (60,)
"""


@pytest.mark.system
def test_what_runs_at_low_priority_has_more_time_until_it_counts_as_hung(tmp_path: Path) -> None:
    for name, text in (
        ("pytest.ini", "[pytest]\ntimeout = 300\n"),
        ("conftest.py", PLUGIN),
        ("tests/e2e/test_system.py", SYSTEM),
        ("tests/kv/test_other.py", OTHER),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    environment = {name: os.environ[name] for name in os.environ if not name.startswith("PYTEST")}
    environment["PYTHONPATH"] = f"{TESTS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    command = [sys.executable, "-m", "pytest", "-n", "2", "-q", "-p", "no:cacheprovider", "tests"]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "3 passed" in ran.stdout
