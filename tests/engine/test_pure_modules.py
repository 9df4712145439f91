"""The engine decides: none of its modules loads torch or the handoff."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.system

CODE = """
import importlib, pkgutil, sys
import tasuki.engine
names = [each.name for each in pkgutil.iter_modules(tasuki.engine.__path__)]
for name in names:
    importlib.import_module(f"tasuki.engine.{name}")
loaded = [m for m in sys.modules if m.split(".")[0] == "torch" or m.startswith("tasuki.kv")]
print(len(names) > 20, loaded)
"""


def test_no_torch_and_no_kv():
    run = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=60)
    assert run.stdout.strip() == "True []", run.stderr
