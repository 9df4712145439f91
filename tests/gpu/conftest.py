"""Tests that need an NVIDIA GPU: `python -m pytest -m gpu tests/gpu`.

They need no server and none of the other tests' packages: with
`--confcutdir tests/gpu` the conftest above is left out. Elsewhere they are
skipped. The first run compiles FlashInfer's kernels, a minute or so each;
later runs find them in its cache.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import pytest
import torch

# What one test compiled, a server that another one starts need not compile again.
os.environ.setdefault(
    "TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir()) / f"tasuki-inductor-{os.getuid()}")
)
_TESTS = Path(__file__).parent.parent
for _folder in (_TESTS, _TESTS / "engine", _TESTS / "models"):
    if str(_folder) not in sys.path:
        sys.path.insert(0, str(_folder))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what lies here, and skip it where there is no GPU."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


class _Tell:
    """Shows failures as they happen: a run that is cut off at a limit has told them."""

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and "gpu" in report.keywords:
            print(
                f"\n{report.nodeid} FAILED:\n{report.longreprtext}", file=sys.__stdout__, flush=True
            )


def pytest_configure(config: pytest.Config) -> None:
    """Add what tells failures."""
    config.pluginmanager.register(_Tell())
