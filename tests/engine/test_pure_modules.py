"""The scheduler and what it stands on load neither torch nor the handoff."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.system

CODE = """
import sys
import tasuki.engine.scheduler, tasuki.engine.block_pool, tasuki.engine.prefix_cache
import tasuki.engine.engine
print([m for m in sys.modules if m.split(".")[0] == "torch" or m.startswith("tasuki.kv")])
"""


def test_no_torch_and_no_kv():
    run = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=60)
    assert run.stdout.strip() == "[]", run.stderr
