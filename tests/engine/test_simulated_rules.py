"""Rules that the simulator copies give the values that it is tested with."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.mark.parametrize("rule", ["step_sizes", "prompt_shares", "prompt_rates", "worker_steps"])
def test_the_simulator_is_tested_with_this_rule(rule: str, monkeypatch: pytest.MonkeyPatch):
    """`crates/sim/src/worker/chunks.rs` copies the rule and is tested with the same file."""
    monkeypatch.setattr(sys, "path", [str(GOLDEN), *sys.path])
    make = importlib.import_module(f"make_{rule}")
    committed = (GOLDEN / f"{rule}.json").read_text(encoding="utf-8")
    assert make.generate() == committed, f"change chunks.rs too, run make_{rule}.py"
